"""Clients that leave, run out of time, read slowly or come in crowds; and the router's own end."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.runtime.errors import error_from_rpc
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import common_pb2, mesh_pb2
from tests.router.mesh import Mesh, expected, request, running_mesh
from tests.support.waiting import eventually

REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL


async def _raises(code: grpc.StatusCode, call: "asyncio.Task[object] | object") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call  # type: ignore[misc]
    assert raised.value.code() is code, raised.value.details()
    return raised.value


async def test_cancel_while_decoding(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].pause_at = 5
        call = mesh.stub.Generate(request(max_tokens=20))
        while True:
            message = await call.read()
            assert isinstance(message, mesh_pb2.GenerateResponse)
            if message.delta.first_index + len(message.delta.token_ids) == 5:  # tokens may come together
                break
        call.cancel()
        await mesh.until_whole()
        assert mesh["d0"].cancels == [mesh["d0"].submits[0].request_id]


async def test_cancel_while_prefilling_reaches_both_legs(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["p0"].prefill_plan = ["mute"]
        call = mesh.stub.Generate(request())
        await eventually(lambda: mesh["p0"].prefills)
        call.cancel()
        await eventually(lambda: mesh["p0"].num_cancelled_prefills == 1)
        await mesh.until_whole()
        assert len(mesh["d0"].cancels) == 1


@pytest.mark.parametrize(("goal_ms", "most"), [(0, 0), (60_000, 60_000), (1, 1)])
async def test_the_time_to_the_first_token_reaches_both_legs(model_folder: Path, goal_ms: int, most: int) -> None:
    """Until there are tokens: after them there is no first one to wait for. 1: the time is over."""
    async with running_mesh(model_folder) as mesh:
        asked = request()
        asked.options.slo_ttft_ms = goal_ms
        mesh["p0"].prefill_plan = ["break_after_first"]
        mesh.router.core.forecaster = None  # which refuses what it cannot have in time
        assert (await mesh.generate(asked)).tokens() == expected(8)
        told = [each.ttft_left_ms for each in (mesh["d0"].submits[0], mesh["p0"].prefills[0])]
        assert all(most // 2 <= each <= most for each in told) and all(told) is bool(goal_ms)
        assert mesh["d0"].submits[-1].request.emitted and mesh["d0"].submits[-1].ttft_left_ms == 0


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_deadline_reaches_both_legs(model_folder: Path, stage: str) -> None:
    async with running_mesh(model_folder) as mesh:
        if stage == "prefill":
            mesh["p0"].prefill_plan = ["mute"]
        mesh["d0"].pause_at = 5
        await _raises(grpc.StatusCode.DEADLINE_EXCEEDED, mesh.generate(request(max_tokens=20), timeout=0.5))
        await mesh.until_whole()
        assert len(mesh["d0"].cancels) == 1
        assert 0 < mesh["d0"].submits[0].time_left_ms <= 600
        assert 0 < mesh["p0"].prefills[0].time_left_ms <= 600


async def test_cancel_in_the_queue_frees_the_turn(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_inflight=1, max_queued=1) as mesh:
        mesh["d0"].pause_at = 5
        admission = mesh.router.core.flow_control.admission
        running = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        await eventually(lambda: admission.num_inflight == 1)
        waiting = mesh.stub.Generate(request())
        await eventually(lambda: admission.num_queued == 1)
        waiting.cancel()
        await eventually(lambda: admission.num_queued == 0)
        mesh["d0"].resume.set()
        assert (await running).tokens() == expected(20)
        await mesh.until_whole()


async def test_overload_is_refused_at_once_with_a_retry_delay(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_inflight=4, max_queued=2) as mesh:
        mesh["d0"].pause_at = 5
        running = [asyncio.create_task(mesh.generate(request(max_tokens=20, seed=seed))) for seed in range(6)]
        admission = mesh.router.core.flow_control.admission
        await eventually(lambda: (admission.num_inflight, admission.num_queued) == (4, 2))
        error = error_from_rpc(await _raises(grpc.StatusCode.RESOURCE_EXHAUSTED, mesh.generate(request())))
        assert error.retry_delay_s is not None and error.retry_delay_s > 0
        assert "max_inflight" in error.message
        mesh["d0"].resume.set()
        answers = await asyncio.gather(*running)
        assert [answer.tokens() for answer in answers] == [expected(20, seed=seed) for seed in range(6)]
        await mesh.until_whole()


async def test_many_streams_at_once(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2, decode=2, max_inflight=64) as mesh:
        answers = await asyncio.gather(*(mesh.generate(request(max_tokens=5 + seed % 20, seed=seed)) for seed in range(64)))
        assert [answer.tokens() for answer in answers] == [expected(5 + seed % 20, seed=seed) for seed in range(64)]
        await mesh.until_whole()


async def test_slow_client_is_cancelled_and_told(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_buffered_tokens=100) as mesh:
        slow = mesh.stub.Generate(request(max_tokens=1900, logprobs=20, n=8))
        quick = asyncio.create_task(mesh.generate(request(max_tokens=30)))
        assert (await quick).tokens() == expected(30)
        await eventually(lambda: mesh["d0"].cancels)
        error = await _raises(grpc.StatusCode.RESOURCE_EXHAUSTED, _read_all(slow))
        assert "too slowly" in (error.details() or "")
        await mesh.until_whole()


async def _read_all(call: grpc.aio.UnaryStreamCall[mesh_pb2.GenerateRequest, mesh_pb2.GenerateResponse]) -> None:
    async for _ in call:
        pass


async def test_drain_lets_streams_finish_then_sends_them_elsewhere(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_inflight=2, max_queued=5, drain_grace_s=1.0) as mesh:
        mesh["d0"].pause_at = 5
        stuck = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        short = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        await eventually(lambda: len(mesh["d0"].held) == 2)
        queued = asyncio.create_task(mesh.generate(request()))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_queued == 1)
        draining = asyncio.create_task(mesh.router.frontend.drain(1.0))
        await _raises(grpc.StatusCode.UNAVAILABLE, queued)
        await _raises(grpc.StatusCode.UNAVAILABLE, mesh.generate(request()))
        assert not stuck.done() and not short.done()
        error = await _raises(grpc.StatusCode.UNAVAILABLE, stuck)
        assert "resume" in (error.details() or "")
        await _raises(grpc.StatusCode.UNAVAILABLE, short)
        await draining
        await mesh.until_whole()


async def test_drained_streams_deliver_what_they_have(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        mesh["d0"].pause_at = 5
        received: list[int] = []
        reading = asyncio.create_task(_collect(mesh, received))
        await eventually(lambda: len(received) == 5)
        await mesh.router.frontend.drain(0.05)
        await _raises(grpc.StatusCode.UNAVAILABLE, reading)
        assert received == expected(5)


async def _collect(mesh: Mesh, received: list[int]) -> None:
    async for message in mesh.stub.Generate(request(max_tokens=20)):
        received.extend(message.delta.token_ids)


async def test_invalid_requests_reach_no_worker(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        for wrong, code, field in (
            (request([]), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
            (request([400]), grpc.StatusCode.INVALID_ARGUMENT, "tokens.ids[0]"),
            (request([70] * 2048), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
            (request(max_tokens=2000), grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_tokens"),
            (request(temperature=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature"),
            (mesh_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
            (mesh_pb2.GenerateRequest(model="other", text="x"), grpc.StatusCode.NOT_FOUND, "model"),
        ):
            error = error_from_rpc(await _raises(code, mesh.generate(wrong)))
            assert error.field == field and field.split("[")[0] in error.message
        assert mesh["d0"].submits == []
        assert mesh.router.core.flow_control.admission.num_inflight == 0


async def test_health_follows_the_workers(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=0) as mesh:
        channel = connect(mesh.router.server.address)
        health = health_pb2_grpc.HealthStub(channel)
        await _until_health(health, health_pb2.HealthCheckResponse.SERVING)
        await mesh["d0"].kill()
        await _until_health(health, health_pb2.HealthCheckResponse.NOT_SERVING)
        await channel.close()


async def _until_health(health: health_pb2_grpc.HealthStub, wanted: int) -> None:
    async for answer in health.Watch(health_pb2.HealthCheckRequest(), timeout=10):
        if answer.status == wanted:
            return


async def test_history_that_goes_on_behind_its_end_is_refused(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        history = mesh_pb2.Resume(seed=5, emitted=[common_pb2.EmittedChoice(index=0, token_ids=[64, 258, 65])])
        error = error_from_rpc(await _raises(grpc.StatusCode.INVALID_ARGUMENT, mesh.generate(request(resume=history))))
        assert error.field == "resume.emitted[0].token_ids"
