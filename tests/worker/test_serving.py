"""Pause, sleep and wake of a worker: nothing is lost, and the tokens are the same."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pdmesh.engine.errors import SleepRefused
from pdmesh.runtime.errors import MeshError, error_from_rpc
from pdmesh.v1 import common_pb2, decode_pb2, prefill_pb2, worker_pb2
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
LONG = token_request(PROMPT, max_tokens=600)
RUNNING, PAUSED, ASLEEP = (
    worker_pb2.SERVING_STATE_RUNNING,
    worker_pb2.SERVING_STATE_PAUSED,
    worker_pb2.SERVING_STATE_ASLEEP,
)


async def be(
    peer: Peer, state: worker_pb2.ServingState.ValueType, *, finish_ms: int | None = None
) -> worker_pb2.SetServingResponse:
    request = worker_pb2.SetServingRequest(state=state, finish_running=finish_ms is not None, timeout_ms=finish_ms or 0)
    return await peer.control.SetServing(request)


async def refusal(peer: Peer, request: worker_pb2.SetServingRequest) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.control.SetServing(request)
    return error_from_rpc(caught.value)


async def report(peer: Peer) -> worker_pb2.LoadReport:
    call = peer.control.Watch(worker_pb2.WatchRequest())
    message = await call.read()
    call.cancel()
    assert isinstance(message, worker_pb2.LoadReport)
    return message


async def test_a_pause_stops_requests_where_they_are(model: Model, decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    await eventually(lambda: len(router.of("r1").output()) > 3)
    told = await be(decoder, PAUSED)
    assert (told.state, told.freed_bytes, told.num_requests) == (PAUSED, 0, 1)
    assert (await report(decoder)).serving_state == PAUSED
    num_steps = decoder.engine.stats().num_steps
    await asyncio.sleep(0.3)
    assert decoder.engine.stats().num_steps == num_steps
    with pytest.raises(grpc.aio.AioRpcError, match="paused or asleep") as caught:
        await router.submit(decoder, "r2", LONG, mode=LOCAL)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await be(decoder, PAUSED)).num_requests == 1
    assert (await be(decoder, RUNNING)).num_requests == 0
    assert (await report(decoder)).serving_state == RUNNING
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, LONG)[0]


async def test_what_is_cancelled_in_a_pause_is_released(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    await eventually(lambda: router.of("r1").output())
    await be(decoder, PAUSED)
    await decoder.decode.Cancel(decode_pb2.CancelRequest(request_id="r1", reason="its client left"))
    await decoder.until_whole()


async def test_a_pause_may_wait_for_what_runs(model: Model, decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    told = await be(decoder, PAUSED, finish_ms=60_000)
    assert told.num_requests == 0
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, LONG)[0]
    await be(decoder, RUNNING)
    await router.submit(decoder, "r2", token_request(PROMPT, max_tokens=1900), mode=LOCAL)
    assert (await be(decoder, PAUSED, finish_ms=50)).num_requests == 1  # it was not enough
    await be(decoder, RUNNING)


async def test_a_sleeper_gives_its_requests_back_and_its_memory(model: Model, decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    await eventually(lambda: router.of("r1").output())
    told = await be(decoder, ASLEEP)
    assert (told.state, told.num_requests) == (ASLEEP, 0)
    assert told.freed_bytes > 0
    await eventually(lambda: router.of("r1").failure)
    failure = router.of("r1").failure
    assert failure is not None
    assert failure.code == grpc.StatusCode.ABORTED.value[0]
    assert decoder.is_whole()
    assert (await be(decoder, ASLEEP)).freed_bytes == 0
    await be(decoder, RUNNING)
    emitted = common_pb2.EmittedChoice(token_ids=router.of("r1").output())
    await router.submit(decoder, "r1", token_request(PROMPT, max_tokens=600, emitted=[emitted]), attempt=2, mode=LOCAL)
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, LONG)[0]


async def test_kv_comes_from_a_worker_that_has_slept(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    """The pool is another file then, which the next connection brings."""
    expected = reference(model, token_request(PROMPT))[0]
    for number in range(3):
        await router.generate(prefiller, decoder, f"r{number}", token_request(PROMPT))
        assert router.of(f"r{number}").output() == expected
        for peer in (prefiller, decoder):
            await peer.until_whole()
            assert (await be(peer, ASLEEP, finish_ms=5000)).freed_bytes > 0
            assert (await be(peer, (RUNNING, PAUSED)[number % 2])).state != ASLEEP
            await be(peer, RUNNING)


async def test_hand_offs_that_are_under_way(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    """Stopped in the middle, they go on; a sleeper ends them, and is whole."""
    request = token_request([10 + (11 * i) % 200 for i in range(1500)])
    asked = asyncio.ensure_future(router.generate(prefiller, decoder, "r1", request))
    await eventually(lambda: prefiller.worker.prefill.num_running)
    await be(prefiller, PAUSED)
    await asyncio.sleep(0.2)
    assert not router.of("r1").output()
    await be(prefiller, RUNNING)
    await asked
    assert router.of("r1").output() == reference(model, request)[0]
    other = token_request([10 + (13 * i) % 200 for i in range(1500)])
    asked = asyncio.ensure_future(router.generate(prefiller, decoder, "r2", other))
    await eventually(lambda: prefiller.worker.prefill.num_running)
    await be(prefiller, ASLEEP)
    await asyncio.gather(asked, return_exceptions=True)
    assert prefiller.is_whole()
    await be(prefiller, RUNNING)


async def test_nonsense_is_refused_by_name(decoder: Peer) -> None:
    for state in (0, 77):
        error = await refusal(decoder, worker_pb2.SetServingRequest(state=state))  # type: ignore[arg-type]
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "state")
    error = await refusal(decoder, worker_pb2.SetServingRequest(state=PAUSED, finish_running=True, timeout_ms=10**9))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "timeout_ms")
    assert (await report(decoder)).serving_state == RUNNING


async def test_an_abort_is_reported_once_the_worker_is_in_the_state(decoder: Peer, router: MiniRouter) -> None:
    """Routers end their requests: the worker leaves them as a pause does."""
    assert (await report(decoder)).abort_id == 0
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    await decoder.control.SetServing(worker_pb2.SetServingRequest(state=PAUSED, abort_running=True, abort_id=9))
    said = await report(decoder)
    assert (said.serving_state, said.abort_id) == (PAUSED, 9)
    await decoder.control.SetServing(worker_pb2.SetServingRequest(state=ASLEEP, abort_running=True))
    said = await report(decoder)
    assert said.serving_state == ASLEEP
    assert said.abort_id not in (0, 9), "one of its own"
    await be(decoder, RUNNING)
    assert (await report(decoder)).abort_id == said.abort_id


@pytest.mark.parametrize(
    "request_",
    [
        worker_pb2.SetServingRequest(state=RUNNING, abort_running=True),
        worker_pb2.SetServingRequest(state=PAUSED, abort_running=True, finish_running=True),
    ],
)
async def test_an_abort_that_contradicts_itself_is_refused(decoder: Peer, request_: worker_pb2.SetServingRequest) -> None:
    error = await refusal(decoder, request_)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "abort_running" in error.message
    assert (await report(decoder)).abort_id == 0


async def test_an_engine_that_cannot_sleep_runs_on(
    model: Model, decoder: Peer, router: MiniRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise SleepRefused("state: a GPU")

    async def fail() -> int:
        raise SleepRefused("state: the pool")

    await router.submit(decoder, "r0", LONG, mode=LOCAL)
    await eventually(lambda: router.of("r0").output())
    with monkeypatch.context() as patched:
        patched.setattr(decoder.worker.engine, "check_sleep", refuse)
        error = await refusal(decoder, worker_pb2.SetServingRequest(state=ASLEEP))
        assert (error.code, error.field) == (grpc.StatusCode.FAILED_PRECONDITION, "state")
    await router.until_finished("r0")  # nothing was given up for it
    assert router.of("r0").output() == reference(model, LONG)[0]
    monkeypatch.setattr(decoder.worker.engine, "fall_asleep", fail)
    for before in (RUNNING, PAUSED):
        await be(decoder, before)
        error = await refusal(decoder, worker_pb2.SetServingRequest(state=ASLEEP))
        assert (error.code, error.field) == (grpc.StatusCode.FAILED_PRECONDITION, "state")
        assert (await report(decoder)).serving_state == before
    await be(decoder, RUNNING)
    await router.submit(decoder, "r1", token_request(PROMPT), mode=LOCAL)
    await router.until_finished("r1")


async def test_weights_that_cannot_be_read_leave_it_asleep(
    decoder: Peer, router: MiniRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await be(decoder, ASLEEP)
    with monkeypatch.context() as patched:

        async def fail() -> None:
            raise OSError(5, "input/output error")

        patched.setattr(decoder.worker.engine, "wake", fail)
        error = await refusal(decoder, worker_pb2.SetServingRequest(state=RUNNING))
        assert (error.code, "input/output error" in error.message) == (grpc.StatusCode.UNAVAILABLE, True)
        assert (await report(decoder)).serving_state == ASLEEP
    await be(decoder, RUNNING)
    await router.submit(decoder, "r1", token_request(PROMPT), mode=LOCAL)
    await router.until_finished("r1")


async def test_a_sleeper_takes_no_weights_and_one_that_is_paused_does(decoder: Peer) -> None:
    await be(decoder, ASLEEP)
    folder = str(decoder.engine.config.model)
    with pytest.raises(grpc.aio.AioRpcError, match="asleep") as caught:
        await decoder.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(folder=folder))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await be(decoder, PAUSED)
    assert not (await decoder.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(folder=folder))).is_new
    await be(decoder, RUNNING)


@pytest.mark.parametrize("state", [PAUSED, ASLEEP])
async def test_a_stopped_worker_leaves_at_once(model: Model, state: worker_pb2.ServingState.ValueType) -> None:
    """What is stopped there would not end within its grace period."""
    async with running_worker(model, worker_id="leaving") as peer:
        router = MiniRouter()
        await router.attach(peer)
        await router.submit(peer, "r1", LONG, mode=LOCAL)
        await eventually(lambda: router.of("r1").output())
        await be(peer, state)
        async with asyncio.timeout(10):
            await peer.worker.drain(60.0)
        error = await refusal(peer, worker_pb2.SetServingRequest(state=RUNNING))
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        await router.detach()


async def test_roles_change_at_once_while_it_is_paused(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    await eventually(lambda: router.of("r1").output())
    await be(decoder, PAUSED)
    async with asyncio.timeout(10):
        await decoder.control.SetRoles(worker_pb2.SetRolesRequest(roles=[worker_pb2.ROLE_PREFILL], drain_timeout_ms=60_000))
    assert decoder.is_whole()
    await be(decoder, RUNNING)


async def test_many_changes_at_once_end_in_the_last_one(model: Model, decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    states = [PAUSED, RUNNING, ASLEEP, RUNNING, PAUSED, ASLEEP, PAUSED, RUNNING] * 3
    await asyncio.gather(*(be(decoder, state) for state in states))
    assert (await report(decoder)).serving_state in (RUNNING, PAUSED, ASLEEP)
    await be(decoder, RUNNING)
    await router.submit(decoder, "r2", LONG, mode=LOCAL)
    await router.until_finished("r2")
    assert router.of("r2").output() == reference(model, LONG)[0]


async def test_another_change_does_not_wait_for_requests_to_end(model: Model, decoder: Peer, router: MiniRouter) -> None:
    """Else a mistaken --finish of a day could not be taken back."""
    for state in (PAUSED, ASLEEP):
        name = f"r{state}"
        await router.submit(decoder, name, LONG, mode=LOCAL)
        waiting = asyncio.ensure_future(be(decoder, state, finish_ms=3600_000))
        await eventually(lambda: not decoder.worker.gate.is_running)
        async with asyncio.timeout(10):
            await be(decoder, RUNNING)
        with pytest.raises(grpc.aio.AioRpcError, match="another SetServing came") as caught:
            await waiting
        assert caught.value.code() is grpc.StatusCode.ABORTED
        await router.until_finished(name)
        assert router.of(name).output() == reference(model, LONG)[0]


async def test_a_hand_off_outlasts_a_pause_that_is_longer_than_its_lease(model: Model) -> None:
    async with (
        running_worker(model, roles=("prefill",), worker_id="p", lease_s=0.6) as prefiller,
        running_worker(model, roles=("decode",), worker_id="d", lease_s=0.6) as decoder,
    ):
        router = MiniRouter()
        await router.attach(decoder)
        request = token_request([10 + (11 * i) % 200 for i in range(1500)])
        asked = asyncio.ensure_future(router.generate(prefiller, decoder, "r1", request))
        await eventually(lambda: prefiller.worker.prefill.num_running and prefiller.engine.stats().num_steps)
        await be(prefiller, PAUSED)
        await asyncio.sleep(2.5)
        assert not asked.done()
        await be(prefiller, RUNNING)
        await asked
        assert router.of("r1").output() == reference(model, request)[0]
        await router.detach()


async def test_a_sleeper_sends_no_blocks(decoder: Peer) -> None:
    await be(decoder, ASLEEP)
    with pytest.raises(grpc.aio.AioRpcError, match="paused or asleep") as caught:
        await decoder.control.SendBlocks(worker_pb2.SendBlocksRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await be(decoder, RUNNING)


async def test_a_repeated_pause_that_waits_still_waits(model: Model, decoder: Peer, router: MiniRouter) -> None:
    """The second call takes the place of the first: its client may have lost the answer."""
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    first = asyncio.ensure_future(be(decoder, PAUSED, finish_ms=3600_000))
    await eventually(lambda: not decoder.worker.gate.is_running)
    assert (await be(decoder, PAUSED, finish_ms=3600_000)).num_requests == 0
    with pytest.raises(grpc.aio.AioRpcError, match="another SetServing came"):
        await first
    assert router.of("r1").output() == reference(model, LONG)[0]
    await be(decoder, RUNNING)


async def test_an_embedding_is_given_up_as_well(prefiller: Peer) -> None:
    asked = prefill_pb2.EmbedPromptRequest(
        request=token_request([10 + (11 * i) % 200 for i in range(1500)], max_tokens=1),
        pooling=common_pb2.POOLING_MEAN,
        request_id="r1",
    )
    call = prefiller.prefill.Embed(asked)
    waiting = asyncio.ensure_future(call.code())
    await eventually(lambda: prefiller.worker.prefill.num_held or waiting.done())
    async with asyncio.timeout(15):
        assert (await be(prefiller, ASLEEP)).num_requests == 0
    await waiting
    assert prefiller.is_whole()
    await be(prefiller, RUNNING)
