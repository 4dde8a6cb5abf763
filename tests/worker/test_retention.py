"""Sessions at a worker: what requests retain on both ends of a hand-off, its release, and what is refused."""

from __future__ import annotations

import grpc
import pytest

from pdmesh.runtime.errors import InvalidArgument, error_from_rpc
from pdmesh.v1 import common_pb2, prefill_pb2, worker_pb2
from pdmesh.worker.token_request import TokenRequestTranslator
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, MODEL, Model, Peer, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(53)]  # three full blocks of 16
MAX_TOKENS = 12  # with the output, four


def of_session(*, session: str = "s", seconds: int = 600, final: bool = False, tenant: str = "t") -> common_pb2.TokenRequest:
    request = token_request(PROMPT, max_tokens=MAX_TOKENS)
    request.tenant, request.session_id, request.kv_retention_s, request.session_final = tenant, session, seconds, final
    return request


async def until_retained(peer: Peer, num_blocks: int) -> None:
    """Until the worker reports so many: a prefill worker gives blocks back after the outcome of the push."""
    await eventually(lambda: peer.worker.load.report().num_retained_blocks == num_blocks)


async def release(peer: Peer, session: str = "s", tenant: str = "t") -> int:
    answer = await peer.control.ReleaseRetained(worker_pb2.ReleaseRetainedRequest(tenant=tenant, session_id=session))
    return answer.num_blocks


async def test_both_ends_of_a_hand_off_retain_and_release(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    _, outcome = await router.generate(prefiller, decoder, "r1", of_session())
    assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
    await until_retained(prefiller, 3)
    await until_retained(decoder, 4)
    assert [await release(peer, "other") for peer in (prefiller, decoder)] == [0, 0]
    assert [await release(peer, tenant="") for peer in (prefiller, decoder)] == [0, 0]
    assert [await release(peer) for peer in (prefiller, decoder)] == [3, 4]
    assert [await release(peer) for peer in (prefiller, decoder)] == [0, 0]
    await until_retained(prefiller, 0)
    await until_retained(decoder, 0)


async def test_the_final_request_of_a_session_releases_it(decoder: Peer, router: MiniRouter) -> None:
    await router.submit(decoder, "r1", of_session(), mode=LOCAL)
    await router.until_finished("r1")
    await until_retained(decoder, 4)
    await router.submit(decoder, "r2", of_session(final=True), mode=LOCAL)
    await router.until_finished("r2")
    await until_retained(decoder, 0)


async def test_a_worker_that_retains_nothing_registers_that_and_takes_the_hint(model: Model, router: MiniRouter) -> None:
    async with running_worker(model, engine={"max_retained_share": 0.0}) as peer:
        assert list(peer.info.lacks) == [worker_pb2.ENGINE_LACK_RETENTION]
        await router.attach(peer)
        await router.submit(peer, "r1", of_session(), mode=LOCAL)
        await router.until_finished("r1")
        assert await release(peer) == 0
        assert peer.worker.load.report().num_retained_blocks == 0
        await router.detach()


@pytest.mark.parametrize("session", ["", "two words", "ä", "x" * 257, "line\n"])
async def test_what_is_no_session_cannot_be_released(decoder: Peer, session: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await release(decoder, session)
    error = error_from_rpc(refused.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == "session_id"
    assert not session or session not in str(error)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (of_session(session="two words"), "session_id"),
        (of_session(session="x" * 257), "session_id"),
        (of_session(session="tab\t"), "session_id"),
        (of_session(seconds=86_401), "kv_retention_s"),
        (of_session(session="", final=True), "session_final"),
    ],
    ids=["spaces", "long", "tab", "days", "nameless"],
)
async def test_nonsense_is_refused_by_name(wanted: common_pb2.TokenRequest, field: str) -> None:
    translate = TokenRequestTranslator(MODEL, lambda tenant, salt: b"")
    with pytest.raises(InvalidArgument) as refused:
        await translate(wanted)
    assert refused.value.field == f"request.{field}"
    assert field != "session_id" or wanted.session_id[:40] not in str(refused.value)


async def test_what_a_request_says_reaches_the_engine() -> None:
    translate = TokenRequestTranslator(MODEL, lambda tenant, salt: b"")
    retention = (await translate(of_session(final=True))).retention
    assert retention is not None
    assert (retention.tenant, retention.session, retention.seconds, retention.final) == ("t", "s", 600, True)
    without = (await translate(of_session(session="", seconds=60))).retention
    assert without is not None and without.session == "", "it may be worth keeping without a session, until its time is over"
    assert (await translate(of_session(seconds=0))).retention is None
