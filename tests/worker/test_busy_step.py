"""What needs no step is answered while one runs: an instrument holds the engine in a step, and lets it end when the test says."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from pdmesh.engine.engine import Engine, EngineStep
from pdmesh.v1 import decode_pb2, prefill_pb2, worker_pb2
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, only_transport, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(53)]
LONG = token_request(PROMPT, max_tokens=40)
DEADLINE_S = 30.0


class HeldStep:
    """Hold an engine in its next step, before its kernels or after them."""

    def __init__(self, engine: Engine, *, computes_first: bool) -> None:
        self.is_under_way, self._may_end = threading.Event(), threading.Event()
        run = engine.run_step

        def held(step: EngineStep) -> None:
            if computes_first:
                run(step)
            self.is_under_way.set()
            assert self._may_end.wait(DEADLINE_S), "the test has not let the step end"
            if not computes_first:
                run(step)

        self._engine, self._run = engine, run
        engine.run_step = held  # type: ignore[method-assign]

    def end(self) -> None:
        self._engine.run_step = self._run  # type: ignore[method-assign]
        self._may_end.set()

    @property
    def has_ended(self) -> bool:
        return self._may_end.is_set()


@contextlib.asynccontextmanager
async def in_a_step(peer: Peer, router: MiniRouter, *, computes_first: bool = False) -> AsyncIterator[HeldStep]:
    """The decode worker is in a step of the request "long"."""
    step = HeldStep(peer.engine, computes_first=computes_first)
    try:
        await router.submit(peer, "long", LONG, mode=LOCAL)
        assert await asyncio.to_thread(step.is_under_way.wait, DEADLINE_S)
        yield step
        assert not step.has_ended, "all that was answered was answered before the step ended"
    finally:
        step.end()


@pytest.mark.parametrize("computes_first", [False, True], ids=["before its kernels", "behind its kernels"])
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_a_whole_handoff_passes_while_a_step_runs(
    model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter, transport: str, computes_first: bool
) -> None:
    request = token_request(PROMPT[:40] + [3] * 9)
    async with in_a_step(decoder, router, computes_first=computes_first):
        reservation = await router.submit(decoder, "r1", request)
        _, outcome = await router.prefill(prefiller, decoder, "r1", request, only_transport(reservation, transport))
        assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED, outcome
        assert decoder.engine.stats().num_running == 2, "it waits for the next step only"
    for request_id, each in (("r1", request), ("long", LONG)):
        await router.until_finished(request_id, 1)
        assert [router.of(request_id).output()] == reference(model, each)


async def test_a_cancel_is_answered_while_a_step_computes_its_request(decoder: Peer, router: MiniRouter, model: Model) -> None:
    async with in_a_step(decoder, router):
        cancelled = await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="long"))
        assert cancelled.found
        stats = decoder.engine.stats()
        assert stats.num_running == 1 and stats.num_free_blocks < stats.num_total_blocks, "the step still uses its blocks"
        again = await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="long"))
        assert not again.found
        assert not decoder.worker.decode.reservations._idle.is_set(), "a drain waits for the engine"
        await router.submit(decoder, "long", LONG, mode=LOCAL, attempt=2)
    await router.until_finished("long", 1)
    assert [router.of("long").output()] == reference(model, LONG)
    await decoder.until_whole()


async def test_a_reservation_is_released_while_a_step_runs(decoder: Peer, router: MiniRouter) -> None:
    async with in_a_step(decoder, router):
        before = decoder.engine.stats()
        await router.submit(decoder, "r1", token_request([3] * 200))
        assert decoder.engine.stats().num_reserved == 1
        assert (await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="r1"))).found
        await eventually(lambda: decoder.engine.stats().num_reserved == 0)
        assert decoder.engine.stats().num_free_blocks == before.num_free_blocks


async def test_the_state_of_a_worker_is_told_while_a_step_runs(decoder: Peer, router: MiniRouter) -> None:
    async with in_a_step(decoder, router):
        assert (await decoder.control.GetInfo(worker_pb2.GetInfoRequest())).worker_id == "d"
        async for load in decoder.control.Watch(worker_pb2.WatchRequest()):
            assert load.num_running + load.num_waiting <= 1
            break
        parts = [part async for part in decoder.control.ListBlocks(worker_pb2.ListBlocksRequest())]
        assert parts[-1].is_last
        released = await decoder.control.ReleaseRetained(worker_pb2.ReleaseRetainedRequest(tenant="t", session_id="s"))
        assert released.num_blocks == 0
        assert not (await decoder.control.ListAdapters(worker_pb2.ListAdaptersRequest())).adapters


async def test_an_engine_that_has_stopped_is_said_in_one_line(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker(model, roles=("prefill", "decode"), worker_id="d") as peer:
        await peer.worker.engine.stop()
        router = MiniRouter()
        for call in (
            router.submit(peer, "r1", LONG),
            router.submit(peer, "r2", LONG, mode=LOCAL),
            anext(aiter(peer.control.ListBlocks(worker_pb2.ListBlocksRequest()))),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "this worker is stopping" in (raised.value.details() or "")
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_prefix_that_the_step_is_computing_is_not_found(model: Model, decoder: Peer, router: MiniRouter) -> None:
    async with in_a_step(decoder, router):
        reservation = await router.submit(decoder, "r1", LONG)
        assert reservation.num_cached_tokens == 0
        await router.submit(decoder, "r1", LONG, mode=LOCAL, attempt=2)
    for request_id in ("r1", "long"):
        await router.until_finished(request_id, 1)
        assert [router.of(request_id).output()] == reference(model, LONG)


async def test_blocks_that_a_cancelled_request_gives_back_behind_the_step_are_waited_for(model: Model) -> None:
    """There is room for one request of the two: the second is not refused, since the first is on its way out."""
    router = MiniRouter()
    async with running_worker(model, roles=("decode",), worker_id="d", engine={"num_blocks": 6}) as decoder:
        await router.attach(decoder)
        async with in_a_step(decoder, router):
            await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="long"))
            second = asyncio.create_task(router.submit(decoder, "r1", token_request([3] * 60, max_tokens=4), mode=LOCAL))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(second), 0.3)
            assert not second.done(), "blocks come with the end of the step"
        await second
        await router.until_finished("r1", 1)
        await router.detach()


async def test_a_prefill_is_accepted_and_withdrawn_while_a_step_runs(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    """The prefill worker is in a step of one prompt: another one joins the queue, and leaves it, before the step ends."""
    first, second = token_request(PROMPT), token_request([5] * 30)
    held = HeldStep(prefiller.engine, computes_first=False)
    try:
        reservations = [await router.submit(decoder, name, each) for name, each in (("r1", first), ("r2", second))]
        running = asyncio.create_task(router.prefill(prefiller, decoder, "r1", first, reservations[0]))
        assert await asyncio.to_thread(held.is_under_way.wait, DEADLINE_S)
        joining = asyncio.create_task(router.prefill(prefiller, decoder, "r2", second, reservations[1]))
        await eventually(lambda: prefiller.engine.stats().num_waiting == 1)
        joining.cancel()
        await eventually(lambda: prefiller.engine.stats().num_waiting == 0)
        assert not running.done() and not held.has_ended
    finally:
        held.end()
    _, outcome = await running
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
    await router.until_finished("r1", 1)
    assert (await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="r2"))).found
