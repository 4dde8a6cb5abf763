"""A real Prometheus scrapes a mesh of real processes under load: every panel of every dashboard and every rule finds data."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.commands.up import _metrics_told, _scaled
from pdmesh.commands.up_autoscale import AutoscaleOptions
from pdmesh.errors import MeshError
from pdmesh.launcher import local_state
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.monitoring import rules
from pdmesh.monitoring.dashboards import all_dashboards
from pdmesh.monitoring.manifests import rules_file
from pdmesh.monitoring.panels import Dashboard
from tests.mesh import oracle
from tests.mesh.checks import Footprint
from tests.support.prometheus import BINARY, Prometheus, running_prometheus
from tests.support.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(BINARY is None, reason="prometheus is not installed (Debian's package of that name)"),
]
SCALING = AutoscaleOptions(autoscale=True, max_workers=3, ttft_ms=60_000, tpot_ms=60_000, quantile=0.9)
FIXED = {"$__rate_interval": "20s", "$model": ".*", "$tenant": ".*", "$priority": ".*", "$worker": ".*"}
GUESSING = ("--speculation", "prompt_lookup", "--draft-length", "4")
PATIENCE_S = 90.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    """A model whose output repeats itself, so that there is something to guess; and few places, so that some are refused."""
    folder = tmp_path_factory.mktemp("metrics")
    config = LocalMeshConfig(
        model=str(make_tiny_model(folder / "looping", initializer_range=0.05)),
        num_prefill=1,
        num_decode=1,
        port=0,
        num_threads=1,
        metrics_port=0,
        max_workers=3,
        log_dir=str(folder / "logs"),
        worker_args=GUESSING,
        router_args=("--max-inflight=4", "--max-queued=2"),
    )
    path = SCALING.objectives_file(config, Path(config.log_dir))
    config = replace(config, router_args=(*config.router_args, "--objectives", str(path)))
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        async with _scaled(mesh, SCALING) as targets, _metrics_told(mesh, targets):
            yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def prometheus(mesh: LocalMesh, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    """While requests come all the time."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "pdmesh.rules.yaml").write_text(rules_file(replace(group, interval="1s") for group in rules.groups()))
    targets = mesh.log_dir / local_state.TARGETS_FILE
    loading = asyncio.create_task(_load(mesh))
    try:
        async with running_prometheus(folder, targets, folder / "pdmesh.rules.yaml") as prometheus:
            yield prometheus
    finally:
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading


async def _load(mesh: LocalMesh) -> None:
    """Of all kinds: more than there are places, so that some are refused; prefix hits; both modes."""
    async with AsyncClient(mesh.router_addresses) as client:
        for number in range(10**6):
            asking = [_ask(client, number + index) for index in range(8 if number % 5 == 0 else 2)]
            await asyncio.gather(*asking)
            await asyncio.sleep(0.05)


async def _ask(client: AsyncClient, number: int) -> None:
    prompt = oracle.prompt_of(number % 20, 60)
    mode, priority = ("remote", "local")[number % 2], ("interactive", "standard", "batch")[number % 3]
    with suppress(MeshError):
        await client.generate(
            prompt,
            temperature=0,
            max_tokens=24,
            ignore_eos=True,
            mode=mode,
            priority=priority,
            tenant=f"t{number % 2}",
            timeout=30,
        )


async def _missing(prometheus: Prometheus, exprs: list[str]) -> list[str]:
    """Those that find nothing, after they had time to."""
    async with asyncio.timeout(PATIENCE_S + 10):
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while exprs := [expr for expr in exprs if not await prometheus.values(expr)]:
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(1)
    return exprs


def _filled(expr: str) -> str:
    for name, value in FIXED.items():
        expr = expr.replace(name, value)
    return expr


async def test_every_process_is_a_target_and_up(mesh: LocalMesh, prometheus: Prometheus) -> None:
    wanted = {"router-0", "prefill-0", "decode-0", "autoscaler"}
    assert not await _missing(prometheus, [f'up{{instance="{name}"}} == 1' for name in wanted])
    told = json.loads((mesh.log_dir / local_state.TARGETS_FILE).read_text())
    assert {each["labels"]["instance"] for each in told} >= wanted


@pytest.mark.parametrize("dashboard", all_dashboards(), ids=lambda dashboard: dashboard.name)
async def test_every_query_of_every_panel_finds_data(prometheus: Prometheus, dashboard: Dashboard) -> None:
    exprs = [_filled(query.expr) for panel in dashboard.panels for query in panel.queries]
    assert await _missing(prometheus, exprs) == []
    for variable in dashboard.variables:
        found = await prometheus.ask(f"label/{variable.label}/values", **{"match[]": variable.metric})
        assert found, variable


async def test_every_rule_is_evaluated_and_every_record_is_there(prometheus: Prometheus) -> None:
    records = [rule.record for group in rules.groups() for rule in group.rules if rule.record]
    assert await _missing(prometheus, records) == []
    told = [rule for group in (await prometheus.ask("rules"))["groups"] for rule in group["rules"]]
    assert len(told) == sum(len(group.rules) for group in rules.groups())
    assert [(rule["name"], rule.get("lastError")) for rule in told if rule["health"] != "ok"] == []


async def test_what_alerts_look_at_exists(prometheus: Prometheus) -> None:
    names = {name for group in rules.groups() for rule in group.rules if rule.alert for name in _metrics_of(rule.expr)}
    assert await _missing(prometheus, [f"count({name})" for name in sorted(names)]) == []


def _metrics_of(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:pdmesh[_:][a-zA-Z0-9_:]+|up)\b", expr))


async def test_figures_move_and_agree(prometheus: Prometheus) -> None:
    assert not await _missing(prometheus, ["rate(pdmesh_kv_sent_bytes_total[20s]) > 0", "pdmesh:mfu:ratio > 0"])
    whole = "sum(gen_ai_server_time_to_first_token_seconds_sum)"
    missing = f"({whole} - sum(pdmesh_ttft_part_seconds_sum)) / sum(gen_ai_server_time_to_first_token_seconds_count)"
    assert -0.001 < (await prometheus.values(missing))[0] < 0.001, "parts of TTFT add up to it, within a millisecond"
    assert all(0 < value < 1 for value in await prometheus.values("pdmesh:memory_bandwidth_utilization:ratio > 0"))
    (good,) = await prometheus.values("sum(pdmesh:goodput:rate5m)")
    assert good > 0
