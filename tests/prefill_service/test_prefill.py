"""Prefill calls: refused by name, cancelled anywhere, and the blocks go back exactly once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from pdmesh.engine.outputs import FinishReason, SequenceUpdate, StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime import failpoints
from pdmesh.runtime.errors import ResourceExhausted, error_from_rpc
from pdmesh.v1 import decode_pb2, prefill_pb2
from prefill_service.first_tokens import FirstTokensSink
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually, slowly
from tests.support.worker_mesh import Model, Peer, history, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
REQUEST = token_request(PROMPT)
INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


async def submitted(decoder: Peer, router: MiniRouter, name: str = "r1") -> prefill_pb2.PrefillRequest:
    reservation = await router.submit(decoder, name, REQUEST)
    return prefill_pb2.PrefillRequest(request_id=name, request=REQUEST, reservation=reservation, identity=decoder.info.identity)


async def cancel(decoder: Peer, name: str = "r1") -> None:
    await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id=name))


REFUSED: dict[str, tuple[Callable[[prefill_pb2.PrefillRequest], object], grpc.StatusCode, str]] = {
    "no id": (lambda r: setattr(r, "request_id", ""), INVALID, "request_id"),
    "no request": (lambda r: r.ClearField("request"), INVALID, "request"),
    "no reservation": (lambda r: r.ClearField("reservation"), INVALID, "reservation"),
    "no identity": (lambda r: r.ClearField("identity"), INVALID, "identity"),
    "foreign weights": (lambda r: setattr(r.identity, "weights_hash", "x"), PRECONDITION, "identity.weights_hash"),
    "foreign protocol": (lambda r: setattr(r.identity, "protocol_version", 99), PRECONDITION, "identity.protocol_version"),
    "no block size": (lambda r: setattr(r.reservation.layout, "block_size", 0), PRECONDITION, "layout.block_size"),
    "other arrangement": (lambda r: setattr(r.reservation.layout, "arrangement", "?"), PRECONDITION, "layout.arrangement"),
    "no reservation id": (lambda r: setattr(r.reservation, "reservation_id", ""), INVALID, "reservation.reservation_id"),
    "no epoch": (lambda r: setattr(r.reservation, "epoch", 0), INVALID, "reservation.epoch"),
    "no token": (lambda r: setattr(r.reservation, "token", b""), INVALID, "reservation.token"),
    "no attempt": (lambda r: setattr(r.reservation, "attempt", 0), INVALID, "reservation.attempt"),
    "no endpoints": (lambda r: r.reservation.ClearField("endpoints"), INVALID, "reservation.endpoints"),
    "odd cached": (lambda r: setattr(r.reservation, "num_cached_tokens", 5), INVALID, "reservation.num_cached_tokens"),
    "all cached": (lambda r: setattr(r.reservation, "num_cached_tokens", 64), INVALID, "reservation.num_cached_tokens"),
    "empty prompt": (lambda r: r.request.ClearField("prompt_token_ids"), INVALID, "request.prompt_token_ids"),
    "unknown token": (lambda r: r.request.prompt_token_ids.append(99999), INVALID, "request.prompt"),
    "other model": (lambda r: setattr(r.request, "model", "x"), PRECONDITION, "request.model"),
    "history, complete": (lambda r: r.request.emitted.extend(history([1] * 12)), INVALID, "request.emitted"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_by_name(prefiller: Peer, decoder: Peer, router: MiniRouter, name: str) -> None:
    change, code, field = REFUSED[name]
    request = await submitted(decoder, router)
    change(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefiller.prefill.Prefill(request).read()
    error = error_from_rpc(caught.value)
    assert error.code is code, error
    assert error.field is not None
    assert error.field.startswith(field), error
    await cancel(decoder)


async def test_full_queue_is_refused_with_a_delay(model: Model, decoder: Peer, router: MiniRouter) -> None:
    async with running_worker(model, engine={"max_num_seqs": 1, "max_num_batched_tokens": 16}) as prefiller:
        engine = prefiller.engine
        step = engine.step

        def slow_step() -> StepResult | None:
            time.sleep(0.3)
            return step()

        engine.step = slow_step  # type: ignore[method-assign]
        first = asyncio.create_task(_events(prefiller, await submitted(decoder, router)))
        await eventually(lambda: engine.stats().num_waiting)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _events(prefiller, await submitted(decoder, router, "r2"))
        error = error_from_rpc(caught.value)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_delay_s is not None
        assert (await first)[-1].outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
        await cancel(decoder, "r2")
        await cancel(decoder)


async def test_a_prompt_whose_blocks_are_reserved_gives_way(model: Model, decoder: Peer, router: MiniRouter) -> None:
    """Two workers may each hold the blocks that the other's pushes wait for: somebody has to notice."""
    async with running_worker(model, engine={"num_blocks": 5}) as both, AsyncExitStack() as stack:
        holder = MiniRouter()
        await holder.attach(both)
        stack.push_async_callback(holder.detach)
        await holder.submit(both, "held", REQUEST)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _events(both, await submitted(decoder, router))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "reservations" in (caught.value.details() or "")
        assert both.engine.stats().num_waiting == 0
        await cancel(both, "held")
        await cancel(decoder)


async def _events(peer: Peer, request: prefill_pb2.PrefillRequest) -> list[prefill_pb2.PrefillEvent]:
    return [event async for event in peer.prefill.Prefill(request)]


@pytest.mark.parametrize("point", ["prefill.accepted", "prefill.computed", "push.hello", "push.part", "push.before_commit"])
async def test_cancelled_at_each_state(prefiller: Peer, decoder: Peer, router: MiniRouter, point: str) -> None:
    failpoints.install(f"{point}=delay:10000@1")
    call = prefiller.prefill.Prefill(await submitted(decoder, router))
    if point != "prefill.accepted":
        event = await call.read()
        assert isinstance(event, prefill_pb2.PrefillEvent)
        assert event.HasField("first_tokens")
    else:
        await eventually(lambda: prefiller.worker.prefill.num_running)
    began = time.monotonic()
    call.cancel()
    await eventually(lambda: prefiller.worker.prefill.num_running == 0)
    await prefiller.until_whole()
    assert time.monotonic() - began < 5
    await cancel(decoder)


@pytest.mark.parametrize("point", ["prefill.accepted", "prefill.computed"])
async def test_an_error_at_each_state_leaves_everything_whole(
    prefiller: Peer, decoder: Peer, router: MiniRouter, point: str
) -> None:
    failpoints.install(f"{point}=error@1")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _events(prefiller, await submitted(decoder, router))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    await prefiller.until_whole()
    await cancel(decoder)


async def test_deadline_stops_compute_and_push(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    failpoints.install("prefill.computed=delay:10000@1")
    request = await submitted(decoder, router)
    request.time_left_ms = 300
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _events(prefiller, request)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await prefiller.until_whole()
    await cancel(decoder)


async def test_decode_that_is_gone_is_a_retryable_failure(model: Model, prefiller: Peer) -> None:
    router = MiniRouter()
    async with running_worker(model) as decoder:
        request = await submitted(decoder, router)
        await cancel(decoder)
    outcome = (await _events(prefiller, request))[-1].outcome
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED
    assert outcome.retryable
    assert prefiller.worker.load.report().num_handoff_failures == 1
    await prefiller.until_whole()


async def test_timings_are_measured_each_by_itself(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    """A delay before the engine lies in the queue's part and in the whole, nowhere else."""
    failpoints.install("prefill.accepted=delay:200@1")
    [first, last] = await _events(prefiller, await submitted(decoder, router))
    timings = first.first_tokens.timings
    assert timings.prefill_queue_ns > 200e6
    assert timings.service_ns == timings.prefill_queue_ns + timings.prefill_compute_ns + timings.return_ns
    assert (timings.num_computed_tokens, timings.num_cached_tokens, timings.num_steps) == (60, 0, 1)
    assert last.outcome.kv_exposed_ns > 0
    await cancel(decoder)


async def test_what_passes_while_the_engine_takes_the_prompt_is_queue(
    prefiller: Peer, decoder: Peer, router: MiniRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may lose the interpreter there, for the five milliseconds after which Python takes it from another."""
    engine = prefiller.engine
    monkeypatch.setattr(engine, "add", slowly(engine.add, 0.05))
    [first, _] = await _events(prefiller, await submitted(decoder, router))
    timings = first.first_tokens.timings
    assert timings.prefill_queue_ns > 50e6
    assert timings.service_ns == timings.prefill_queue_ns + timings.prefill_compute_ns + timings.return_ns
    await cancel(decoder)


async def test_a_prompt_that_lost_its_blocks_is_refused_at_once() -> None:
    """No first token follows, so nothing else would end the wait before the deadline."""
    sink = FirstTokensSink()
    sink.on_update(SequenceUpdate("r", 0, 0, (), (), FinishReason.PREEMPTED))
    with pytest.raises(ResourceExhausted, match="blocks"):
        await sink.wait(10.0)


@pytest.mark.parametrize("left_ms", [0, 60_000])
async def test_the_engine_is_told_from_when_on_a_prompt_waits_for_no_pace(
    prefiller: Peer, decoder: Peer, router: MiniRouter, monkeypatch: pytest.MonkeyPatch, left_ms: int
) -> None:
    told, add = list[int](), prefiller.engine.add

    def spy(asked: EngineRequest, *rest: Any, **named: Any) -> Any:
        told.append(asked.unpaced_from_ns)
        return add(asked, *rest, **named)

    monkeypatch.setattr(prefiller.engine, "add", spy)
    asked, before_ns = await submitted(decoder, router), time.monotonic_ns()
    asked.ttft_left_ms = left_ms
    await _events(prefiller, asked)
    after_ms = [(each - before_ns) / 1e6 if each else 0 for each in told]
    assert len(told) == 1 and left_ms / 2 <= after_ms[0] <= left_ms / 2 * 1.5
    await cancel(decoder)
