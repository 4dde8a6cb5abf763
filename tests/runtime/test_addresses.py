"""Addresses are written and read in one place, and an IPv6 host has brackets wherever a port follows it."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime import addresses
from pdmesh.runtime.addresses import bare_host, join_address, reachable_host, split_address

ROOT = Path(__file__).parents[2]
PACKAGES = ("pdmesh", "router", "kvtransfer", "prefill_service", "decode_service", "pdmesh_vllm")
PLACES = {Path(addresses.__file__), ROOT / "pdmesh/runtime/registry/records.py"}
"""Where an address may be taken apart: the second checks each part of what others have written."""


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("[::1]", "[::1]:80"), ("decode-0.ns", "decode-0.ns:80")],
)
def test_brackets_around_an_ipv6_host(host: str, address: str) -> None:
    assert join_address(host, 80) == address
    assert split_address(address) == (bare_host(host), 80)


@given(st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)), st.integers(1, 65535))
def test_what_was_joined_is_split_again(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("address", ["", ":", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "a:x", "a:١"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


def test_an_ipv6_host_without_brackets_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"brackets, as in \[::1\]:9365, got '::1:9365'"):
        split_address("::1:9365")


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("[::]", "::1"), ("", "127.0.0.1"), ("10.0.0.1", "10.0.0.1")]
)
def test_a_server_on_all_addresses_is_reached_at_the_loopback(host: str, reached: str) -> None:
    assert reachable_host(host) == reached


def test_no_other_module_writes_or_reads_host_and_port() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path not in PLACES and "third_party" not in path.parts and not path.stem.endswith(("_pb2", "_pb2_grpc"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _joins(node) or _strips_brackets(node)
    ]
    assert not found, "use join_address, split_address or bare_host of pdmesh/runtime/addresses.py"


def _joins(node: ast.AST) -> bool:
    """Return whether it is an f-string in which a host, a colon and a port follow each other."""
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return any(
        isinstance(host, ast.FormattedValue)
        and isinstance(colon, ast.Constant)
        and colon.value == ":"
        and isinstance(port, ast.FormattedValue)
        and "host" in ast.unparse(host.value).lower()
        for host, colon, port in zip(parts, parts[1:], parts[2:], strict=False)
    )


def _strips_brackets(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "strip"
    return is_call and isinstance(node, ast.Call) and "host" in ast.unparse(node.func) and "'[]'" in ast.unparse(node)
