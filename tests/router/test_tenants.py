"""The tenants file, and the part of its limits that one router gives out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.config import ConfigError
from router.auth import tenants as auth_tenants
from router.auth.tenants import Tenants, TenantsProblem, TenantTable, at_share
from router.fleet.peers import part
from router.flow_control.capacity import TenantLimits

FILE = """
[default]
weight = 2
[tenants.search]
weight = 4.5
max_inflight = 10
tokens_per_s = 1000
[tenants."odd name"]
tokens_per_s = 10.5
burst_tokens = 20
"""


def test_the_tenants_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    tenants = Tenants(str(path))
    assert tenants.limits_of("search") == TenantLimits(4.5, 10, 1000, 10_000)
    assert tenants.limits_of("odd name") == TenantLimits(1.0, None, 10.5, 20)
    assert tenants.limits_of("anybody") == tenants.limits_of("") == TenantLimits(2)
    tenants.share = lambda tenant: 0.25
    assert tenants.limits_of("search") == TenantLimits(4.5, 2, 250, 2500)
    path.write_text("[tenants.search]\nweight = -1")
    tenants.refresh()
    assert tenants.limits_of("search").weight == 4.5
    path.write_text("[tenants.search]\nweight = 3.0")
    tenants.refresh()
    assert tenants.limits_of("search") == TenantLimits(3.0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.toml", b"[default]\nweight=1.0\n# caf\xe9\n"),
        ("t.toml", b"a = " + b"[" * 100_000),
        ("t.json", b"[" * 200_000),
        ("t.json", b'{"tenants": {"a": {"weight": ' + b"9" * 5000 + b"}}}"),
    ],
)
def test_a_hostile_file_changes_nothing_and_is_named(
    tmp_path: Path, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    path.write_text('{"default": {"weight": 3}}' if name == "t.json" else "[default]\nweight = 3")
    tenants = Tenants(str(path))
    path.write_bytes(content)
    tenants.refresh()
    assert tenants.limits_of("a").weight == 3 and name in caplog.text and "Traceback" not in caplog.text
    with pytest.raises(TenantsProblem, match=name):
        auth_tenants.read_tenants_file(path)


def test_json_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"tenants": {"a": {"weight": 2}}}')
    assert auth_tenants.read_tenants_file(path) == TenantTable(tenants={"a": TenantLimits(2)})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[tenants.a]\nweight = 0", "tenants.a.weight"),
        ("[tenants.a]\nweight = nan", "tenants.a.weight"),
        ('[tenants.a]\nweight = "1"', "tenants.a.weight"),
        ("[tenants.a]\nmax_inflight = 1.5", "tenants.a.max_inflight"),
        ("[tenants.a]\nmax_inflight = true", "tenants.a.max_inflight"),
        ("[tenants.a]\nburst_tokens = 5", "tenants.a.burst_tokens"),
        ("[tenants.a]\nrate = 5", "tenants.a.rate"),
        ("[tenants]\na = 5", "tenants.a"),
        ("[default]\ntokens_per_s = -1", "default.tokens_per_s"),
        ("[tenant.a]", "tenant"),
        ("tenants = 1", "tenants"),
        ("[", ""),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(TenantsProblem, match=f"tenants.toml: {field}"):
        auth_tenants.read_tenants_file(path)
    with pytest.raises(ConfigError, match="--tenants"):
        Tenants(str(path))


@given(st.integers(1, 1000), st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_places_of_all_routers_exceed_the_limit_by_one_each_at_most(limit: int, demands: list[float]) -> None:
    parts = [at_share(TenantLimits(max_inflight=limit), part(own, demands)).max_inflight or 0 for own in demands]
    assert min(parts) >= 1 and sum(parts) <= limit + len(demands) - 1
