"""WorkerControl, roles and drain."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from kvtransfer.manifest import PROTOCOL_VERSION
from pdmesh.runtime import failpoints
from pdmesh.runtime.errors import error_from_rpc
from pdmesh.v1 import common_pb2, decode_pb2, prefill_pb2, worker_pb2
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, MODEL, Model, Peer, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
LONG = token_request(PROMPT, max_tokens=400)
PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE


def roles(*wanted: worker_pb2.Role.ValueType, drain_timeout_ms: int = 0) -> worker_pb2.SetRolesRequest:
    return worker_pb2.SetRolesRequest(roles=wanted, drain_timeout_ms=drain_timeout_ms)


async def test_info_is_complete(decoder: Peer) -> None:
    info = await decoder.control.GetInfo(worker_pb2.GetInfoRequest())
    assert (info.worker_id, list(info.roles), list(info.transports)) == ("d", [DECODE], ["shm", "tcp", "grpc"])
    assert [(each.transport, each.scope, each.same_layout) for each in info.transport_reach] == [
        ("shm", worker_pb2.REACH_SCOPE_HOST, False),
        ("tcp", worker_pb2.REACH_SCOPE_EVERYWHERE, False),
        ("grpc", worker_pb2.REACH_SCOPE_EVERYWHERE, False),
    ]
    assert (info.identity.model, info.identity.protocol_version) == (MODEL, PROTOCOL_VERSION)
    assert len(info.identity.weights_hash) == 64
    assert (info.layout.block_size, info.layout.kv_dtype, info.layout.tensor_parallel_size) == (16, "float32", 1)
    assert (info.num_blocks, info.max_num_seqs, info.max_context) == (128, 16, 2048)
    assert info.epoch
    assert info.host_id
    assert (info.engine, list(info.lacks)) == ("pdmesh", [])
    assert list(info.eos_token_ids)


async def test_context_is_what_the_pool_holds(model: Model) -> None:
    """Otherwise routers would fill up a request to the model's context, and this worker would refuse each of them."""
    async with running_worker(model, engine={"num_blocks": 10}) as peer:
        assert peer.info.max_context == 10 * 16


async def test_what_the_engine_lacks_is_registered(model: Model) -> None:
    async with running_worker(model, engine={"keep_pace": False}) as peer:
        assert (peer.info.engine, list(peer.info.lacks)) == ("pdmesh", [worker_pb2.ENGINE_LACK_PACES])


async def test_workers_of_one_model_have_one_identity(prefiller: Peer, decoder: Peer) -> None:
    assert prefiller.info.identity == decoder.info.identity
    assert prefiller.info.epoch != decoder.info.epoch


async def test_watch_reports_at_once_then_each_period_and_each_change(model: Model) -> None:
    async with running_worker(model) as peer:
        call = peer.control.Watch(worker_pb2.WatchRequest(period_ms=10_000))
        first = await call.read()
        assert isinstance(first, worker_pb2.LoadReport)
        assert (list(first.roles), first.max_num_seqs, first.num_free_blocks) == ([PREFILL, DECODE], 16, 128)
        began = time.monotonic()
        await peer.control.SetRoles(roles(DECODE))
        changed = await call.read()
        assert isinstance(changed, worker_pb2.LoadReport)
        assert list(changed.roles) == [DECODE]
        assert time.monotonic() - began < 5
        call.cancel()
        fast = peer.control.Watch(worker_pb2.WatchRequest(period_ms=20))
        began = time.monotonic()
        for _ in range(5):
            await fast.read()
        assert time.monotonic() - began < 5
        fast.cancel()


@pytest.mark.parametrize("period_ms", [1, 10_001])
async def test_watch_refuses_odd_periods(decoder: Peer, period_ms: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decoder.control.Watch(worker_pb2.WatchRequest(period_ms=period_ms)).read()
    assert error_from_rpc(caught.value).field == "period_ms"


@pytest.mark.parametrize("wanted", [(), (0,), (1, 77)])
async def test_set_roles_refuses(decoder: Peer, wanted: tuple[int, ...]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decoder.control.SetRoles(worker_pb2.SetRolesRequest(roles=wanted))  # type: ignore[arg-type]
    assert error_from_rpc(caught.value).field == "roles"
    assert list(decoder.info.roles) == [DECODE]


async def test_a_role_that_is_off_is_named(prefiller: Peer, decoder: Peer) -> None:
    router = MiniRouter()
    for call in (
        router.submit(prefiller, "r1", LONG),
        prefiller_call(decoder, prefill_pb2.PrefillRequest(request_id="r1")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = error_from_rpc(caught.value)
        assert (error.code, error.field) == (grpc.StatusCode.FAILED_PRECONDITION, "roles")


async def prefiller_call(peer: Peer, request: prefill_pb2.PrefillRequest) -> object:
    return await peer.prefill.Prefill(request).read()


async def test_removed_decode_role_drains(model: Model, decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", LONG, mode=LOCAL)
    changing = asyncio.ensure_future(decoder.control.SetRoles(roles(PREFILL)))
    await eventually(lambda: list(decoder.info.roles) == [PREFILL])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.submit(decoder, "r2", LONG)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert list((await changing).roles) == [PREFILL]
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, LONG)[0]


async def test_removed_role_gives_up_after_its_timeout(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", token_request(PROMPT, max_tokens=1900), mode=LOCAL)
    await decoder.control.SetRoles(roles(PREFILL, drain_timeout_ms=100))
    await eventually(lambda: router.of("r1").failure)
    failure = router.of("r1").failure
    assert failure is not None
    assert failure.code == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_a_known_request_goes_on_while_its_role_drains(model: Model, decoder: Peer, router: MiniRouter) -> None:
    """The next attempt of a request that is here is no new work."""
    await router.submit(decoder, "r1", LONG)
    changing = asyncio.ensure_future(decoder.control.SetRoles(roles(PREFILL)))
    await eventually(lambda: list(decoder.info.roles) == [PREFILL])
    await router.submit(decoder, "r1", LONG, attempt=2, mode=LOCAL)
    await changing
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, LONG)[0]


async def test_drain_finishes_what_runs_and_waits_for_pushes(model: Model, decoder: Peer, router: MiniRouter) -> None:
    async with running_worker(model, roles=("prefill",)) as prefiller:
        failpoints.install("push.before_commit=delay:300@1")
        request = token_request(PROMPT)
        reservation = await router.submit(decoder, "r1", request)
        leg = asyncio.create_task(router.prefill(prefiller, decoder, "r1", request, reservation))
        await eventually(lambda: router.of("r1").tokens)
        await prefiller.worker.drain(10.0)
        assert prefiller.worker.prefill.num_running == 0
        _, outcome = await leg
        assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.prefill(prefiller, decoder, "r1", request, reservation)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await router.until_finished("r1")


async def test_drain_gives_up_after_its_grace(model: Model) -> None:
    async with running_worker(model) as peer:
        router = MiniRouter()
        await router.attach(peer)
        await router.submit(peer, "r1", token_request(PROMPT, max_tokens=1900), mode=LOCAL)
        await eventually(lambda: len(router.of("r1").tokens.get(0, ())) > 3)
        await peer.worker.drain(0.1)
        assert peer.worker.load.report().draining
        await peer.worker.stop()
        await eventually(lambda: router.ended)
        assert router.ended == [grpc.StatusCode.UNAVAILABLE]
        failure = router.of("r1").failure
        assert failure is not None
        assert failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
        await router.detach()


async def test_failed_engine_is_reported(model: Model) -> None:
    failures: list[BaseException] = []
    with pytest.raises(AssertionError):  # the peer's own check: this worker cannot be whole any more
        async with running_worker(model) as peer:
            router = MiniRouter()
            peer.engine.step = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
            with pytest.raises(grpc.aio.AioRpcError):
                for attempt in range(100):
                    await router.submit(peer, f"r{attempt}", LONG, mode=LOCAL)
            failures = peer.failures
            await eventually(lambda: failures)
            for record in list(peer.worker.decode.reservations.active):
                peer.engine.release(record.engine_id)
    assert isinstance(failures[0], ZeroDivisionError)


async def test_submit_of_many_and_cancel_of_all(decoder: Peer, router: MiniRouter) -> None:
    names = [f"r{i}" for i in range(16)]
    request = token_request(PROMPT[:20], max_tokens=100)
    await asyncio.gather(*(router.submit(decoder, name, request, mode=LOCAL) for name in names))
    await asyncio.gather(*(decoder.decode.Cancel(decode_pb2.CancelRequest(request_id=name)) for name in names))
    await decoder.until_whole()


async def test_a_worker_that_drains_hands_over_what_runs_there(model: Model, decoder: Peer, router: MiniRouter) -> None:
    """Its cache holds the KV of prompt and output. New prompts it refuses, and when nothing runs, this too."""
    running = token_request(PROMPT, max_tokens=1900)
    async with running_worker(model, roles=("decode",)) as leaving:
        here = MiniRouter("router-2")
        await here.attach(leaving)
        await here.submit(leaving, "r1", running, mode=LOCAL)
        await eventually(lambda: len(here.of("r1").tokens.get(0, ())) > 60)
        draining = asyncio.create_task(leaving.worker.drain(20.0))
        await eventually(lambda: leaving.worker.gate.draining)
        emitted = here.of("r1").output()[:60]
        moved = token_request(PROMPT, max_tokens=80, emitted=[common_pb2.EmittedChoice(index=0, token_ids=emitted)])
        reservation = await router.submit(decoder, "r1", moved)
        first, outcome = await router.prefill(leaving, decoder, "r1", moved, reservation)
        assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
        assert first is not None and first.timings.num_cached_tokens > len(PROMPT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.prefill(leaving, decoder, "r2", LONG, reservation)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await leaving.decode.Cancel(decode_pb2.CancelRequest(request_id="r1"))
        await draining
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.prefill(leaving, decoder, "r1", moved, reservation)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await here.detach()
    await router.until_finished("r1")
    tokens = router.of("r1").tokens[0]
    assert emitted + [tokens[index] for index in range(60, 80)] == reference(model, token_request(PROMPT, max_tokens=80))[0]
