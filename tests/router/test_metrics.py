"""What a router shows of real requests in front of stub workers, and that its counts never go back."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.v1 import common_pb2, mesh_pb2
from router.flow_control.capacity import AdmissionCounts
from router.telemetry import metrics as telemetry_metrics
from router.telemetry.fleet_metrics import AdmissionTotals
from router.telemetry.metrics import RequestMetrics, priority_name
from tests.router.mesh import Mesh, mesh_of, request, running_mesh
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.runtime.telemetry.scrape import Page, scrape

SHOWN = TelemetryConfig(metrics_port=0)
PROMISE = "[tiny]\nttft_ms = 60000\ntpot_ms = 60000\nquantile = 0.9\n"


async def look(mesh: Mesh) -> Page:
    """What is there now, not what was made a moment ago."""
    server = mesh.router.metrics_url
    await asyncio.sleep(0.3)
    return await asyncio.to_thread(scrape, server)


@pytest.fixture
def promise(tmp_path: Path) -> str:
    path = tmp_path / "objectives.toml"
    path.write_text(PROMISE)
    return str(path)


async def test_a_request_is_measured_by_the_names_of_the_conventions(model_folder: Path, promise: str) -> None:
    async with running_mesh(model_folder, telemetry=SHOWN, objectives=promise) as mesh:
        asked = request()
        asked.options.tenant = "acme"
        answer = await mesh.generate(asked)
        page = await look(mesh)
    labels = {"gen_ai_request_model": "tiny", "tenant": "acme", "priority": "standard", "mode": "remote"}
    assert page.value("gen_ai_server_request_duration_seconds_count", gen_ai_operation_name="text_completion", **labels) == 1
    ttft_s = page.value("gen_ai_server_time_to_first_token_seconds_sum", gen_ai_provider_name="pdmesh", **labels)
    assert ttft_s == pytest.approx(answer.timings.ttft_ns / 1e9)
    assert page.value("gen_ai_server_time_per_output_token_seconds_count", **labels) == 1
    assert page.value("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 8
    assert page.value("pdmesh_tokens_total", type="input", tenant="acme") == 50
    assert page.value("pdmesh_requests_total", ttft_met="true", tpot_met="true", error_type="", **labels) == 1
    assert page.value("pdmesh_admission_admitted_total", tenant="acme") == 1
    assert page.value("pdmesh_policy_decisions_total", policy="least-loaded", mode="remote") == 1


async def test_parts_of_ttft_add_up(model_folder: Path) -> None:
    async with running_mesh(model_folder, telemetry=SHOWN) as mesh:
        for _ in range(3):
            await mesh.generate(request())
        page = await look(mesh)
    state = page.value("gen_ai_server_time_to_first_token_seconds_sum")
    assert page.value("pdmesh_ttft_part_seconds_sum") == pytest.approx(state, rel=0.02, abs=3e-3)
    parts = {sample.labels["part"] for sample in page.samples if sample.name == "pdmesh_ttft_part_seconds_count"}
    assert parts == {"route", "admission_queue", "reserve", "prefill_queue", "prefill_compute", "first_token_return", "retry"}
    assert page.value("pdmesh_handoff_part_seconds_count", part="kv_exposed") == 3


async def test_errors_refusals_and_those_who_leave_are_told_apart(model_folder: Path, promise: str) -> None:
    settings: dict[str, Any] = {"telemetry": SHOWN, "objectives": promise, "max_inflight": 1, "max_queued": 0}
    async with running_mesh(model_folder, **settings) as mesh:
        mesh["p0"].prefill_plan = ["mute"]  # it stays until it is cancelled
        stream = mesh.stub.Generate(request())
        await anext(aiter(stream))
        for wrong in (request(max_tokens=10**9), request()):  # the second finds no place
            with pytest.raises(grpc.aio.AioRpcError):
                await mesh.generate(wrong)
        stream.cancel()
        await mesh.until_whole()
        page = await look(mesh)
    assert page.value("pdmesh_requests_total", error_type="INVALID_ARGUMENT") == 1
    assert page.value("pdmesh_requests_total", error_type="RESOURCE_EXHAUSTED", ttft_met="false") == 1
    assert page.value("pdmesh_requests_total", error_type="CANCELLED") == 1
    assert page.value("pdmesh_admission_refused_total", reason="queue_full") == 1
    assert page.value("pdmesh_admission_inflight") == 0


async def test_a_fault_of_ours_misses_what_was_promised(model_folder: Path, promise: str) -> None:
    settings: dict[str, Any] = {"telemetry": SHOWN, "objectives": promise, "place_timeout_s": 0.1}
    async with running_mesh(model_folder, prefill=0, **settings) as mesh:
        asked = request(mode=mesh_pb2.PREFILL_MODE_REMOTE)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await mesh.generate(asked)
        page = await look(mesh)
    code = failed.value.code().name
    assert code == "UNAVAILABLE"
    assert page.value("pdmesh_requests_total", error_type=code, ttft_met="false") == 1


async def test_retries_workers_and_objectives(model_folder: Path, promise: str) -> None:
    async with running_mesh(model_folder, telemetry=SHOWN, objectives=promise) as mesh:
        mesh["p0"].prefill_plan = ["fail"]
        await mesh.generate(request())
        page = await look(mesh)
    assert page.value("pdmesh_request_retries_total") == 1
    assert page.value("pdmesh_router_workers", role="decode", state="alive") == 1
    assert page.value("pdmesh_objective_seconds", what="ttft", priority="interactive") == 60
    assert page.values("pdmesh_objective_seconds", priority="batch") == [], "batch is promised nothing"
    assert page.value("pdmesh_objective_share") == 0.9


async def test_all_of_the_catalogue_is_shown(model_folder: Path, promise: str) -> None:
    """But what only predictions have, and refusals."""
    workers = [StubWorker("p0", (PREFILL,), revision="green"), StubWorker("d0", (DECODE,), revision="green")]
    async with mesh_of(model_folder, workers, telemetry=SHOWN, objectives=promise) as mesh:
        await mesh.generate(request())
        shown = {sample.name for sample in (await look(mesh)).samples}
    without = {telemetry_metrics.PREDICTION_ERROR, telemetry_metrics.PREDICTION_MISS, telemetry_metrics.REFUSED}
    for instrument in set(telemetry_metrics.ALL) - without:
        assert set(instrument.samples) <= shown, instrument.name


async def test_a_bucket_names_a_trace_of_its_requests(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, trace = RequestMetrics.ended, "4bf92f3577b34da6a3ce929d0e0e4736"

    def traced(metrics: RequestMetrics, *about: Any, **named: Any) -> None:
        ended(metrics, *about, **{**named, "trace": trace})

    monkeypatch.setattr(RequestMetrics, "ended", traced)
    async with running_mesh(model_folder, telemetry=SHOWN) as mesh:
        await mesh.generate(request())
        samples = (await look(mesh)).samples
    names = {sample.name for sample in samples if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": trace}}
    assert {name.removesuffix("_seconds_bucket").rpartition("_server_")[2] for name in names} == {
        "request_duration", "time_to_first_token", "time_per_output_token",
    }  # fmt: skip


async def test_off_shows_nothing_and_counts_nothing(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        await mesh.generate(request())
        assert mesh.router.metrics_url == "" and not mesh.router.metrics.is_on


_STEPS = st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 2]), st.integers(0, 3)), max_size=300)


@given(_STEPS)
def test_counts_of_admission_never_go_back_and_lose_nothing(steps: list[tuple[int, int, int]]) -> None:
    """Though tenants are summed up with others when there are more than 64, and come back. Looked at after some of the steps."""
    counts, totals, told = AdmissionCounts(), AdmissionTotals(), Counter[tuple[str, ...]]()
    num_asked = 0
    for tenant, priority, action in steps:
        tally = counts.of(f"t{tenant}", priority)
        if action == 3:
            totals.look(counts.tallies)
            now = Counter(totals.counters[telemetry_metrics.ADMITTED])
            assert all(now[labels] >= told[labels] for labels in told)
            told = now
        else:
            tally.num_admitted += 1
            num_asked += 1
    totals.look(counts.tallies)
    assert sum(totals.counters[telemetry_metrics.ADMITTED].values()) == num_asked


def test_priorities_have_the_names_of_the_objectives() -> None:
    assert priority_name(common_pb2.PRIORITY_BATCH) == "batch"
