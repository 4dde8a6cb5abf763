"""Admission over gRPC and HTTP: refusals with reason and delay, metadata, counts in the status. Stub workers, real sockets."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from pdmesh.planning.objectives import ModelObjective
from pdmesh.runtime.errors import DETAILS_KEY, ResourceExhausted, Unavailable, error_from_rpc
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.frontend import Frontend
from router.flow_control.capacity import SameForAll, TenantLimits
from router.flow_control.slo_admission import Forecast
from router.lifecycle.request import Request
from router.lifecycle.stages import TokenizeStage
from router.tokenization.prepared_request import PreparedRequest
from tests.router.kserve import calls
from tests.router.mesh import Mesh, expected, request, running_mesh
from tests.router.vllm_engine import test_generate
from tests.support.waiting import eventually


@dataclass
class Sky:
    """A forecaster that says what the test wants, and remembers for whom."""

    answer: Forecast | None
    prepared: PreparedRequest | None = None

    def forecast(self, prepared: PreparedRequest) -> Forecast | None:
        self.prepared = prepared
        return self.answer


GOOD = Forecast(ttft_s=0.01, tpot_s=0.01, has_room=True)
LATE = Forecast(ttft_s=0.8, tpot_s=0.01, has_room=True, ahead_s=0.5)
FULL = Forecast(ttft_s=0.01, tpot_s=0.01, has_room=False)


async def read_all(call: "grpc.aio.UnaryStreamCall[mesh_pb2.GenerateRequest, mesh_pb2.GenerateResponse]") -> list[int]:
    return [token async for message in call for token in message.delta.token_ids]


async def refusal(mesh: Mesh, message: mesh_pb2.GenerateRequest, **metadata: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read_all(mesh.stub.Generate(message, metadata=named(metadata), timeout=30))
    return raised.value


def named(metadata: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"x-pdmesh-{name.replace('_', '-')}", value) for name, value in metadata.items())


async def busy(mesh: Mesh) -> asyncio.Task[object]:
    """Somebody runs until `resume`."""
    mesh["d0"].pause_at = 5
    running = asyncio.create_task(mesh.generate(request(max_tokens=20)))
    await eventually(lambda: mesh["d0"].held)
    return running


@pytest.mark.parametrize(("ahead_s", "status"), [(0.0, 504), (0.79, 429)], ids=["alone", "behind others"])
async def test_a_deadline_that_cannot_be_met_is_tried_again_only_where_others_are_the_cause(
    model_folder: Path, ahead_s: float, status: int
) -> None:
    async with running_mesh(model_folder, http_port=0) as mesh, httpx.AsyncClient() as http:
        sky = mesh.router.core.forecaster = Sky(GOOD)
        running = await busy(mesh)
        sky.answer = Forecast(ttft_s=0.8, tpot_s=0.01, has_room=True, ahead_s=ahead_s)
        assert mesh.router.http is not None
        asked = {"prompt": "abc", "max_tokens": 2}
        answer = await http.post(f"{mesh.router.http.url}/v1/completions", json=asked, headers={"X-Request-Timeout-Ms": "100"})
        assert answer.status_code == status and "800 ms" in answer.json()["error"]["message"]
        assert ("retry-after" in answer.headers) is (status == 429)
        assert answer.headers.get("x-should-retry") == ("false" if status == 504 else None)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_all(mesh.stub.Generate(request(), timeout=0.1))
        assert raised.value.code().name == ("DEADLINE_EXCEEDED" if status == 504 else "RESOURCE_EXHAUSTED")
        mesh["d0"].resume.set()
        await running


async def test_a_refusal_says_reason_numbers_and_delay(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        sky = mesh.router.core.forecaster = Sky(GOOD)
        running = await busy(mesh)
        sky.answer = LATE
        error = await refusal(mesh, request(), slo_ttft_ms="500", priority="interactive", tenant="acme")
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        read = error_from_rpc(error)
        assert isinstance(read, ResourceExhausted) and read.reason == "objective" and read.retry_delay_s == pytest.approx(0.325)
        assert "800 ms" in read.message and "500 ms" in read.message
        details = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(details[DETAILS_KEY])
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info) and info.metadata["reason"] == "objective"
        assert details["grpc-retry-pushback-ms"] in ("325", "326")
        answer = await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest())
        acme = [tally for tally in answer.admission if tally.tenant == "acme"]
        assert [(tally.priority, tally.refused[0].reason, tally.refused[0].count) for tally in acme] == [(1, "objective", 1)]
        mesh["d0"].resume.set()
        await running
        await mesh.until_whole()


async def test_held_while_the_mesh_is_full_and_let_in_when_it_is_not(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        sky = mesh.router.core.forecaster = Sky(GOOD)
        running = await busy(mesh)
        sky.answer = FULL
        held = asyncio.create_task(mesh.generate(request(seed=6)))
        admission = mesh.router.core.flow_control.admission
        await eventually(lambda: admission.num_queued == 1)
        assert admission.num_inflight == 1 and len(mesh["d0"].submits) == 1
        sky.answer = GOOD  # nothing ends: the gate looks by itself
        await eventually(lambda: len(mesh["d0"].submits) == 2)
        mesh["d0"].resume.set()
        assert (await held).tokens() == expected(8, seed=6)
        await running
        await mesh.until_whole()


async def test_whoever_waits_too_long_is_refused(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        sky = mesh.router.core.forecaster = Sky(GOOD)
        running = await busy(mesh)
        sky.answer = FULL
        error = error_from_rpc(await refusal(mesh, request(), slo_ttft_ms="150"))
        assert error.reason == "objective" and "waited" in error.message
        mesh["d0"].resume.set()
        await running
        await mesh.until_whole()


async def test_fields_win_over_metadata_and_metadata_over_objectives(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        core = mesh.router.core
        core.objectives = {"tiny": ModelObjective("tiny", 900, 90, 0.99)}
        sky = core.forecaster = Sky(GOOD)
        message = request()
        message.options.slo_ttft_ms = 700
        metadata = named({"slo_ttft_ms": "600", "slo_tpot_ms": "60", "tenant": "acme", "priority": "Batch"})
        assert await read_all(mesh.stub.Generate(message, metadata=metadata)) == expected(8)
        assert sky.prepared is not None
        assert (sky.prepared.slo_ttft_ms, sky.prepared.slo_tpot_ms, sky.prepared.tenant) == (700, 60, "acme")
        assert sky.prepared.priority == common_pb2.PRIORITY_BATCH
        assert (await mesh.generate(request())).tokens() == expected(8)
        assert (sky.prepared.slo_ttft_ms, sky.prepared.tenant, sky.prepared.priority) == (0, "", common_pb2.PRIORITY_STANDARD)


@pytest.mark.parametrize(
    ("name", "value"),
    [("slo_ttft_ms", "0"), ("slo_tpot_ms", "1.5"), ("slo_ttft_ms", "9" * 12), ("priority", "urgent"), ("tenant", "t" * 129)],
)
async def test_wrong_metadata_names_its_key(model_folder: Path, name: str, value: str) -> None:
    async with running_mesh(model_folder) as mesh:
        error = error_from_rpc(await refusal(mesh, request(), **{name: value}))
        field = "options.tenant" if name == "tenant" else f"x-pdmesh-{name.replace('_', '-')}"
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.field == field


async def test_a_flooding_tenant_does_not_keep_another_out(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_inflight=1, max_queued=8) as mesh:
        running = await busy(mesh)
        admission = mesh.router.core.flow_control.admission
        flood = [mesh.stub.Generate(request(seed=seed), metadata=named({"tenant": "flood"})) for seed in range(30)]
        outcomes = [asyncio.create_task(read_all(call)) for call in flood]
        await eventually(lambda: sum(task.done() for task in outcomes) == 23 and admission.num_queued == 7)
        calm = [mesh.stub.Generate(request(seed=seed), metadata=named({"tenant": "calm"})) for seed in range(3)]
        answers = [asyncio.create_task(read_all(call)) for call in calm]
        await eventually(lambda: sum(task.done() for task in outcomes) == 26)
        mesh["d0"].resume.set()
        assert await asyncio.gather(*answers) == [expected(8, seed=seed) for seed in range(3)]
        ended = await asyncio.gather(*outcomes, return_exceptions=True)
        errors = [error_from_rpc(error) for error in ended if isinstance(error, grpc.aio.AioRpcError)]
        assert sorted(str(error.reason) for error in errors) == ["queue_full"] * 23 + ["share"] * 3
        assert all(error.retry_delay_s for error in errors)
        await running
        await mesh.until_whole()


SAID = {"slo_ttft_ms": "600", "slo_tpot_ms": "60", "tenant": "acme", "priority": "batch"}


def check_said(prepared: PreparedRequest | None) -> None:
    assert prepared is not None and (prepared.slo_ttft_ms, prepared.slo_tpot_ms, prepared.tenant) == (600, 60, "acme")
    assert prepared.priority == common_pb2.PRIORITY_BATCH


async def test_kserve_reads_metadata_and_parameters(model_folder: Path) -> None:
    async with calls.serving(model_folder) as (mesh, stub):
        sky = mesh.router.core.forecaster = Sky(GOOD)
        await stub.ModelInfer(calls.request(), metadata=named(SAID))
        check_said(sky.prepared)
        sky.prepared = None
        async for _ in stub.ModelStreamInfer(iter([calls.request()]), metadata=named(SAID)):
            pass
        check_said(sky.prepared)
        await stub.ModelInfer(calls.request(slo_ttft_ms=600, slo_tpot_ms="60", tenant="acme", priority=3), metadata=named({}))
        check_said(sky.prepared)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ModelInfer(calls.request(), metadata=named({"slo_ttft_ms": "soon"}))
        assert error_from_rpc(raised.value).field == "x-pdmesh-slo-ttft-ms"


async def test_vllms_engine_reads_metadata(model_folder: Path) -> None:
    async with test_generate.serving(model_folder) as (mesh, stub):
        sky = mesh.router.core.forecaster = Sky(GOOD)
        async for _ in stub.Generate(test_generate.request(), metadata=named(SAID)):
            pass
        check_said(sky.prepared)


async def test_leaving_before_the_first_token_is_not_free_once_a_worker_was_asked(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        limiter = mesh.router.core.flow_control.admission.limiter
        limiter.tenants = SameForAll(TenantLimits(tokens_per_s=1e-6, burst_tokens=1e6))
        mesh["d0"].pause_at = 0
        message = request(mode=mesh_pb2.PREFILL_MODE_LOCAL)
        call = mesh.stub.Generate(message, metadata=named({"tenant": "acme"}))
        reading = asyncio.create_task(read_all(call))
        await eventually(lambda: mesh["d0"].held)
        call.cancel()
        await asyncio.wait([reading])
        await mesh.until_whole()
        assert limiter.rates.spent["acme"] == pytest.approx(len(message.tokens.ids), abs=0.1)


async def test_draining_waits_for_requests_that_are_being_made_and_admits_none_of_them(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_mesh(model_folder) as mesh:
        frontend = Frontend(mesh.router.core, (), lambda: True)
        made, tokenize = asyncio.Event(), TokenizeStage.run

        async def wait(stage: TokenizeStage, asked: Request) -> None:
            await made.wait()
            await tokenize(stage, asked)

        monkeypatch.setattr(TokenizeStage, "run", wait)
        stream = frontend.generate(request(), 30.0)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        draining = asyncio.create_task(frontend.drain(30.0))
        await asyncio.sleep(0)
        assert not draining.done()
        made.set()
        with pytest.raises(Unavailable):
            await reading
        await draining
