"""The list of stages: requests enter them in its order, retries re-enter as it says, its names are those of the telemetry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from pdmesh.runtime.errors import Unavailable
from pdmesh.v1 import mesh_pb2
from router.api.frontend import Frontend
from router.lifecycle.hedging import HedgeLimits
from router.lifecycle.stages import STAGES
from router.telemetry import metrics
from tests.router.mesh import Mesh, expected, request, running_mesh
from tests.router.stub_workers import StubWorker
from tests.router.test_spans import prefer, traced
from tests.support.waiting import eventually

REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL
NAMES = [stage.name for stage in STAGES]
BESIDE = "stream"
"""It runs in the client's task while place, reserve, prefill and decode run in their own."""


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the stages that requests enter, as they do."""
    names: list[str] = []
    for stage in STAGES:
        _note_entries(monkeypatch, names, stage.name, stage.run_by)
    return names


def _note_entries(monkeypatch: pytest.MonkeyPatch, names: list[str], name: str, run_by: type[object]) -> None:
    run = getattr(run_by, "run")  # noqa: B009 - each stage has it, with arguments of its own

    def noted(*arguments: object) -> object:
        names.append(name)
        return run(*arguments)

    monkeypatch.setattr(run_by, "run", noted)


def _in_dispatch(entered: list[str]) -> list[str]:
    return [name for name in entered if name in ("place", "reserve", "prefill", "decode")]


async def _half_way(mesh: Mesh) -> tuple[StubWorker, StubWorker]:
    """The decode worker that has sent five tokens of the only request, and the other one, which will send all."""
    decodes = [mesh["d0"], mesh["d1"]]
    await eventually(lambda: any(worker.held for worker in decodes))
    first, other = decodes if decodes[0].held else decodes[::-1]
    await eventually(lambda: sum(map(len, next(iter(first.held.values())).tokens.values())) >= 5)
    other.pause_at = None
    return first, other


def test_names_of_stages_and_classes() -> None:
    assert NAMES == ["validate", "tokenize", "admit", "place", "reserve", "prefill", "decode", "stream", "account"]
    assert [stage.run_by.__name__ for stage in STAGES] == [f"{name.title()}Stage" for name in NAMES]


async def test_the_list_is_what_the_router_runs(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        frontend = Frontend(mesh.router.core, (), lambda: True)
        assert [type(stage) for stage in frontend.pipeline.stages] == [stage.run_by for stage in STAGES]


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_a_request_enters_every_stage_once_in_the_order_of_the_list(
    model_folder: Path, entered: list[str], mode: mesh_pb2.PrefillMode.ValueType
) -> None:
    async with running_mesh(model_folder) as mesh:
        answer = await mesh.generate(request(mode=mode))
        assert (answer.tokens(), answer.timings.mode) == (expected(8), mode)
        await mesh.until_whole()
    assert [name for name in entered if name != BESIDE] == [name for name in NAMES if name != BESIDE]
    assert entered.count(BESIDE) == 1
    assert entered.index("admit") < entered.index(BESIDE) < entered.index("account")


async def test_what_is_refused_is_accounted_for(model_folder: Path, entered: list[str]) -> None:
    async with running_mesh(model_folder) as mesh:
        for wanted in (mesh_pb2.GenerateRequest(), request(max_tokens=0)):
            with pytest.raises(grpc.aio.AioRpcError):
                await mesh.generate(wanted)
    assert entered == ["validate", "account", "validate", "tokenize", "account"]


async def test_a_refused_submit_re_enters_at_place(model_folder: Path, entered: list[str]) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].submit_errors = [Unavailable("not now")]
        assert (await mesh.generate(request(mode=LOCAL))).tokens() == expected(8)
    assert _in_dispatch(entered) == ["place", "reserve", "place", "reserve", "prefill", "decode"]


async def test_a_failed_prefill_re_enters_at_reserve(model_folder: Path, entered: list[str]) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["p0"].prefill_plan = ["break"]
        assert (await mesh.generate(request(mode=REMOTE))).tokens() == expected(8)
    assert _in_dispatch(entered) == ["place", "reserve", "prefill", "reserve", "prefill", "decode"]


async def test_a_hedge_re_enters_at_prefill(model_folder: Path, entered: list[str]) -> None:
    async with running_mesh(model_folder, prefill=2) as mesh:
        mesh.router.core.hedging.limits = HedgeLimits(unknown_s=0.3)
        prefer(mesh, "p0")
        mesh["p0"].prefill_plan = ["mute"]
        assert (await mesh.generate(request())).tokens() == expected(8)
    assert _in_dispatch(entered) == ["place", "reserve", "prefill", "prefill", "decode"]


async def test_a_lost_decode_worker_re_enters_at_place(model_folder: Path, entered: list[str]) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        mesh["d0"].pause_at = mesh["d1"].pause_at = 5
        asking = asyncio.create_task(mesh.generate(request(max_tokens=20, mode=LOCAL)))
        first, _ = await _half_way(mesh)
        first.fail(first.submits[0].request_id, grpc.StatusCode.UNAVAILABLE)
        assert (await asking).tokens() == expected(20)
    assert _in_dispatch(entered) == ["place", "reserve", "prefill", "decode"] * 2


async def test_a_move_runs_the_stages_before_decode_beside_it(model_folder: Path, entered: list[str]) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        mesh["d0"].pause_at = mesh["d1"].pause_at = 5
        asking = asyncio.create_task(mesh.generate(request(max_tokens=20, mode=LOCAL)))
        first, other = await _half_way(mesh)
        first.draining = True
        answer = await asking
        assert (answer.tokens(), answer.timings.decode_worker) == (expected(20), other.name)
    assert _in_dispatch(entered) == ["place", "reserve", "prefill", "decode", "place", "reserve", "prefill"]


async def test_spans_have_the_names_of_the_list(model_folder: Path) -> None:
    async with traced(model_folder, decode=2) as seen:
        seen.mesh["p0"].prefill_plan = ["break"]
        seen.mesh["d0"].pause_at = seen.mesh["d1"].pause_at = 5
        asking = asyncio.create_task(seen.ask(request(max_tokens=20)))
        first, _ = await _half_way(seen.mesh)
        first.draining = True
        await asking
        assert {name.split()[0] for name in seen.client_stream.names} == {span for stage in STAGES for span in stage.spans}


def test_timing_parts_have_the_names_of_the_list() -> None:
    fields = {field.name.removesuffix("_ns") for field in mesh_pb2.Timings.DESCRIPTOR.fields if field.name.endswith("_ns")}
    assert {part for stage in STAGES for part in stage.timing_parts} == fields


def test_metrics_have_the_names_of_the_list() -> None:
    names = {instrument.name for instrument in metrics.ALL}
    per_request = {instrument.name for instrument in metrics.PER_REQUEST}
    listed = {name for stage in STAGES for name in stage.metrics}
    assert per_request <= listed <= names
    for part in metrics.TTFT_PARTS:
        assert all(metrics.TTFT_PART.name in stage.metrics for stage in STAGES if part in stage.timing_parts), part
    for part in metrics.HANDOFF_PARTS:
        assert all(metrics.HANDOFF_PART.name in stage.metrics for stage in STAGES if part in stage.timing_parts), part
