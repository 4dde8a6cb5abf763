"""Submit, Cancel and attempts: idempotent, fenced, and nothing is left behind."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pdmesh.runtime import failpoints
from pdmesh.runtime.errors import error_from_rpc
from pdmesh.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, REMOTE, Model, Peer, history, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
REQUEST = token_request(PROMPT)


async def code_of(call: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code()


async def cancel(peer: Peer, request_id: str) -> bool:
    return (await peer.decode.Cancel(decode_pb2.CancelRequest(request_id=request_id, reason="test"))).found


async def test_submit_is_idempotent(decoder: Peer, router: MiniRouter) -> None:
    first = await router.submit(decoder, "r1", REQUEST)
    assert first == await router.submit(decoder, "r1", REQUEST)
    both = await asyncio.gather(*(router.submit(decoder, "r2", REQUEST) for _ in range(4)))
    assert all(reservation == both[0] for reservation in both)
    assert decoder.engine.stats().num_reserved == 2
    assert await cancel(decoder, "r1")
    assert await cancel(decoder, "r2")


async def test_same_attempt_in_another_mode_is_refused(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", REQUEST, mode=LOCAL)
    assert await code_of(router.submit(decoder, "r1", REQUEST, mode=REMOTE)) is grpc.StatusCode.FAILED_PRECONDITION
    await router.until_finished("r1")


async def test_older_attempt_is_aborted(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", REQUEST, attempt=3)
    assert await code_of(router.submit(decoder, "r1", REQUEST, attempt=2)) is grpc.StatusCode.ABORTED
    assert await cancel(decoder, "r1")


async def test_new_attempt_for_a_running_request_is_refused(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    request = token_request(PROMPT, max_tokens=200)
    reservation = await router.submit(decoder, "r1", request)
    _, outcome = await router.prefill(prefiller, decoder, "r1", request, reservation)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
    assert await code_of(router.submit(decoder, "r1", request, attempt=2)) is grpc.StatusCode.FAILED_PRECONDITION
    assert await cancel(decoder, "r1")


async def test_second_remote_attempt_with_history(model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    """Attempt 1 gave its first token, then its push failed: attempt 2 restates it."""
    failpoints.install("push.before_commit=error@1")
    reservation = await router.submit(decoder, "r1", REQUEST)
    first, outcome = await router.prefill(prefiller, decoder, "r1", REQUEST, reservation)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED
    assert outcome.retryable
    assert first is not None
    assert await code_of(router.submit(decoder, "r1", REQUEST)) is grpc.StatusCode.ABORTED  # that attempt has failed
    again = token_request(PROMPT, emitted=history([first.tokens[0].token_id]))
    second = await router.submit(decoder, "r1", again, attempt=2)
    assert (second.reservation_id, second.attempt) == (reservation.reservation_id, 2)
    _, outcome = await router.prefill(prefiller, decoder, "r1", again, second)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, REQUEST)[0]


@pytest.mark.parametrize("grown", [False, True], ids=["same", "grown"])
async def test_turned_local_after_a_failed_push(
    model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter, grown: bool
) -> None:
    request = token_request(PROMPT[:48])  # with one token more it needs another block
    failpoints.install("push.part=error@1")
    reservation = await router.submit(decoder, "r1", request)
    first, outcome = await router.prefill(prefiller, decoder, "r1", request, reservation)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED
    assert first is not None
    emitted = history([first.tokens[0].token_id]) if grown else []
    await router.submit(decoder, "r1", token_request(PROMPT[:48], emitted=emitted), attempt=2, mode=LOCAL)
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(model, request)[0]
    assert router.of("r1").started is not None


@pytest.mark.parametrize("point", ["push.part", "push.before_commit"])
@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_paused_writer_is_fenced(
    model: Model, prefiller: Peer, decoder: Peer, router: MiniRouter, point: str, mode: int
) -> None:
    failpoints.install(f"{point}=delay:700@1")
    reservation = await router.submit(decoder, "r1", REQUEST)
    paused = asyncio.create_task(router.prefill(prefiller, decoder, "r1", REQUEST, reservation))
    await eventually(lambda: router.of("r1").tokens)
    again = token_request(PROMPT, emitted=history(router.of("r1").output()))
    second = await router.submit(decoder, "r1", again, attempt=2, mode=mode)  # type: ignore[arg-type]
    if mode == REMOTE:
        await router.prefill(prefiller, decoder, "r1", again, second)
    await router.until_finished("r1")
    _, outcome = await paused
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED
    assert router.of("r1").output() == reference(model, REQUEST)[0]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"attempt": 2}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"epoch": 5}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"token": b"guess"}, grpc.StatusCode.PERMISSION_DENIED),
        ({"reservation_id": "no-such"}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_wrong_grant_is_refused(
    prefiller: Peer, decoder: Peer, router: MiniRouter, change: dict[str, object], code: grpc.StatusCode
) -> None:
    reservation = await router.submit(decoder, "r1", REQUEST)
    wrong = common_pb2.Reservation()
    wrong.CopyFrom(reservation)
    for field, value in change.items():
        setattr(wrong, field, value)
    _, outcome = await router.prefill(prefiller, decoder, "r1", REQUEST, wrong)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED
    assert next(iter(change)) in outcome.message and outcome.code == code.value[0]
    assert not outcome.retryable
    _, outcome = await router.prefill(prefiller, decoder, "r1", REQUEST, reservation)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
    await router.until_finished("r1")


async def test_stale_attempt_is_refused_at_hello(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    first = await router.submit(decoder, "r1", REQUEST)
    await router.submit(decoder, "r1", REQUEST, attempt=2)
    _, outcome = await router.prefill(prefiller, decoder, "r1", REQUEST, first)
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED
    assert "attempt" in outcome.message
    assert await cancel(decoder, "r1")


async def test_cancel_after_submit(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", REQUEST)
    assert await cancel(decoder, "r1")
    assert not await cancel(decoder, "r1")
    assert await code_of(router.submit(decoder, "r1", REQUEST)) is grpc.StatusCode.CANCELLED
    await router.submit(decoder, "r1", REQUEST, attempt=2)  # a newer attempt is another matter
    assert await cancel(decoder, "r1")


async def test_cancel_before_submit_leaves_a_tombstone_for_a_lease(model: Model) -> None:
    async with running_worker(model, lease_s=0.4) as decoder:
        router = MiniRouter()
        await router.attach(decoder)
        assert not await cancel(decoder, "r1")
        assert await code_of(router.submit(decoder, "r1", REQUEST, attempt=9)) is grpc.StatusCode.CANCELLED
        await asyncio.sleep(0.45)
        await router.submit(decoder, "r1", REQUEST)
        assert await cancel(decoder, "r1")
        await router.detach()


async def test_only_what_the_router_names_is_kept(model: Model) -> None:
    """A Submit that came after its Cancel was forgotten is nobody's: a living router must not keep its blocks for ever."""
    async with running_worker(model, lease_s=0.4) as decoder:
        router = MiniRouter()
        await router.attach(decoder)
        for name in ("kept", "lost"):
            await router.submit(decoder, name, REQUEST)
        router.waiting.discard("lost")
        await eventually(lambda: decoder.engine.stats().num_reserved == 1)
        await asyncio.sleep(0.9)
        assert decoder.engine.stats().num_reserved == 1
        assert await cancel(decoder, "kept")
        await router.detach()


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_cancel_in_every_state(prefiller: Peer, decoder: Peer, router: MiniRouter, mode: int) -> None:
    request = token_request(PROMPT, max_tokens=500)
    reservation = await router.submit(decoder, "r1", request, mode=mode)  # type: ignore[arg-type]
    if mode == REMOTE:
        await router.prefill(prefiller, decoder, "r1", request, reservation)
    await eventually(lambda: len(router.of("r1").tokens.get(0, ())) > 5)
    assert await cancel(decoder, "r1")
    await decoder.until_whole()
    assert not router.of("r1").finished
    assert router.of("r1").failure is None


async def test_cancel_while_receiving(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    failpoints.install("push.before_commit=delay:300")
    reservation = await router.submit(decoder, "r1", REQUEST)
    pushing = asyncio.create_task(router.prefill(prefiller, decoder, "r1", REQUEST, reservation))
    await eventually(lambda: router.of("r1").tokens)
    assert await cancel(decoder, "r1")
    _, outcome = await pushing
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_FAILED


async def test_no_room_keeps_nothing(model: Model) -> None:
    async with running_worker(model, engine={"max_num_seqs": 2}) as decoder:
        router = MiniRouter()
        await router.attach(decoder)
        for name in ("r1", "r2"):
            await router.submit(decoder, name, REQUEST)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.submit(decoder, "r3", REQUEST)
        error = error_from_rpc(caught.value)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_delay_s is not None
        assert not await cancel(decoder, "r3")
        for name in ("r1", "r2"):
            assert await cancel(decoder, name)
        await router.detach()


@pytest.mark.parametrize("point", ["decode.reserved", "decode.receiving", "decode.committed", "decode.running"])
async def test_an_error_at_each_state_leaves_everything_whole(
    prefiller: Peer, decoder: Peer, router: MiniRouter, point: str
) -> None:
    failpoints.install(f"{point}=error@1")
    try:
        reservation = await router.submit(decoder, "r1", REQUEST)
        await router.prefill(prefiller, decoder, "r1", REQUEST, reservation)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INTERNAL
    await cancel(decoder, "r1")
    await decoder.until_whole()
    await prefiller.until_whole()
