"""The way back: a prefill worker fetches what the decode worker computed in an earlier turn, and computes the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from pdmesh.engine.engine import EngineStep
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime import failpoints
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import common_pb2, mesh_pb2, prefill_pb2, worker_pb2
from pdmesh.worker.engines.builtin import BuiltinSharing
from prefill_service import kv_pull, kv_send
from router.config import RouterConfig
from router.telemetry.timings import RequestTimings
from router.tokenization.prepared_request import scoped_salt
from tests.mesh import oracle
from tests.router.mesh import Answer, Mesh, running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker

BLOCK = 16
REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_tiny(tiny)


@contextmanager
def armed(text: str) -> Iterator[None]:
    failpoints.install(text)
    try:
        yield
    finally:
        failpoints.install("")


class Pair:
    """A prefill worker that always pulls, a decode worker, and a router in front of both."""

    def __init__(self, mesh: Mesh, prefill: Peer, decode: Peer) -> None:
        self.mesh, self.prefill, self.decode = mesh, prefill, decode

    async def answer(
        self, prompt: Sequence[int], mode: mesh_pb2.PrefillMode.ValueType = REMOTE, salt: str = "", n: int = 1
    ) -> Answer:
        sampling = common_pb2.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, n=n)
        options = mesh_pb2.RequestOptions(mode=mode, cache_salt=salt)
        request = mesh_pb2.GenerateRequest(tokens=mesh_pb2.TokenIds(ids=prompt), sampling=sampling, options=options)
        return await self.mesh.generate(request)

    async def right(self, prompt: Sequence[int]) -> list[int]:
        """What one worker answers that finds nothing in its cache."""
        return (await self.answer(prompt, LOCAL, salt="alone")).tokens()

    @property
    def num_prefilled(self) -> int:
        return self.prefill.engine.stats().num_prefilled_tokens

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens that were pulled, pulls that failed."""
        puller = self.prefill.worker.puller
        assert puller is not None
        return puller.counts.num_tokens, puller.counts.num_failed


@pytest.fixture
async def pair(model: Model, tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    overrides = getattr(request, "param", {"transports": ("tcp", "shm", "grpc")})
    async with running_pair(model, tiny, overrides) as made:
        yield made


@asynccontextmanager
async def running_pair(model: Model, tiny: Path, overrides: dict[str, Any]) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        prefill, decode = [
            await stack.enter_async_context(running_worker(model, roles=(role,), worker_id=role, kv_pull="always", **overrides))
            for role in ("prefill", "decode")
        ]
        config = RouterConfig(
            port=0,
            models=(f"tiny={tiny}",),
            workers=(prefill.info.address, decode.info.address),
            drain_grace_s=0.3,
            linger_s=0.0,
            hedge_share=0.0,  # on a busy machine a late prompt would be computed elsewhere, and nothing fetched
        )
        router, stub = await stack.enter_async_context(running_router(config))
        await eventually(router.core.fleet.ready)
        yield Pair(Mesh(router, stub, {}), prefill, decode)


async def first_turn(pair: Pair, number: int) -> list[int]:
    """Return prompt and answer of a turn that the decode worker has computed in part."""
    prompt = oracle.prompt_of(number, 100)
    return [*prompt, *(await pair.answer(prompt)).tokens()]


@pytest.mark.parametrize("pair", [{"transports": (name,)} for name in ("tcp", "shm", "grpc")], indirect=True)
async def test_the_next_turn_computes_only_what_is_new(pair: Pair) -> None:
    history = await first_turn(pair, 1)
    before = pair.num_prefilled
    prompt = [*history, *oracle.prompt_of(2, 30)]
    answer = await pair.answer(prompt)
    known = (len(history) - 1) // BLOCK * BLOCK  # the last token had no KV
    assert pair.num_prefilled - before == len(prompt) - known
    assert pair.counts == (known - 100 // BLOCK * BLOCK, 0)
    assert answer.tokens() == await pair.right(prompt)
    assert answer.timings.prefill_worker == "prefill"


async def test_kv_in_int8_is_fetched_as_it_is(tiny: Path) -> None:
    """It is rounded once, where it was computed."""
    native = load_tiny(tiny, backend="native", kv_dtype="int8")
    async with running_pair(native, tiny, {"engine": {"backend": "native"}}) as pair:
        assert pair.decode.info.layout.kv_dtype == "int8"
        history = await first_turn(pair, 12)
        prompt = [*history, 7]
        answer = await pair.answer(prompt)
        assert pair.counts[0] > 0
        assert answer.tokens() == (await pair.answer(prompt, LOCAL)).tokens()


async def test_the_time_of_a_fetch_is_told_apart(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[common_pb2.PrefillTimings]()
    prefilled = RequestTimings.prefilled

    def watched(self: RequestTimings, timings: common_pb2.PrefillTimings) -> None:
        seen.append(timings)
        prefilled(self, timings)

    monkeypatch.setattr(RequestTimings, "prefilled", watched)
    history = await first_turn(pair, 11)
    await pair.answer([*history, 7])
    first, second = (each for each in seen if each.num_steps)
    assert (first.fetch_ns, first.num_fetched_tokens) == (0, 0)
    assert second.num_fetched_tokens == pair.counts[0] > 0
    assert 0 < second.fetch_ns <= second.prefill_queue_ns


async def test_a_cold_prefill_worker_computes_nothing_that_the_decode_worker_has(pair: Pair) -> None:
    prompt = oracle.prompt_of(3, 150)
    first = (await pair.answer(prompt, LOCAL)).tokens()
    longer = [*prompt, *first, 7]
    answer = await pair.answer(longer, n=2)
    known = (len(longer) - 2) // BLOCK * BLOCK
    assert pair.num_prefilled == len(longer) - known
    assert pair.counts == (known, 0)
    assert answer.tokens() == await pair.right(longer)


async def test_blocks_that_went_away_are_computed(pair: Pair) -> None:
    """The holder lets go of the last ones between the router's word and the question: what is left comes."""
    prompt = oracle.prompt_of(4, 150)
    first = (await pair.answer(prompt, LOCAL)).tokens()
    pin = BuiltinSharing.pin

    async def without_the_last(self: BuiltinSharing, pin_id: str, hashes: Sequence[bytes]) -> tuple[int, ...]:
        return await pin(self, pin_id, hashes[:3])

    longer = [*prompt, *first]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuiltinSharing, "pin", without_the_last)
        answer = await pair.answer(longer)
    assert pair.counts == (3 * BLOCK, 0)
    assert answer.tokens() == await pair.right(longer)


async def test_another_prefill_worker_fetches_from_its_peer(pair: Pair, model: Model) -> None:
    """The first one computed the prompt, and takes no more: the decode worker has forgotten everything."""
    prompt = oracle.prompt_of(8, 150)
    await pair.answer(prompt)
    async with running_worker(model, roles=("prefill",), worker_id="peer", kv_pull="always") as peer:
        fleet = pair.mesh.router.core.fleet
        fleet._add(peer.info.address, static=True)
        await eventually(lambda: len(fleet.views()) == 3)
        pair.prefill.worker.gate.draining = True
        await eventually(lambda: len(fleet.views()) == 2)
        held = pair.decode.engine.published_blocks()[1]
        pair.decode.engine._pool.withdraw([pair.decode.engine._pool._block_of[each] for each in held])
        answer = await pair.answer([*prompt, 7])
        assert peer.worker.puller is not None
        assert peer.worker.puller.counts.num_tokens == 150 // BLOCK * BLOCK
        assert peer.engine.stats().num_prefilled_tokens == 151 - 150 // BLOCK * BLOCK
        assert answer.timings.prefill_worker == "peer"
    pair.prefill.worker.gate.draining = False
    assert answer.tokens() == await pair.right([*prompt, 7])


def hurry(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pull be given up after a second, and a holder that failed be left out until the end of the test."""
    monkeypatch.setattr(kv_pull, "FORCED_LIMIT_S", 1.0)
    monkeypatch.setattr(kv_pull, "LEFT_OUT_S", 3600.0)
    monkeypatch.setattr(kv_pull, "MOST_LEFT_OUT_S", 3600.0)


async def test_a_decode_worker_that_computes_a_prompt_itself_fetches_it_too(pair: Pair, model: Model) -> None:
    """A worker of both roles, or one that computes what no prefill worker can: LOCAL."""
    prompt = oracle.prompt_of(4, 150)
    await pair.answer([*prompt, 9])
    async with running_worker(model, roles=("decode",), worker_id="peer", kv_pull="always") as peer:
        fleet = pair.mesh.router.core.fleet
        fleet._add(peer.info.address, static=True)
        await eventually(lambda: len(fleet.views()) == 3)
        pair.decode.worker.gate.draining = True
        await eventually(lambda: len(fleet.views()) == 2)
        answer = await pair.answer([*prompt, 8], LOCAL)
        assert peer.worker.puller is not None
        assert peer.worker.puller.counts.num_tokens == 150 // BLOCK * BLOCK
        assert peer.engine.stats().num_prefilled_tokens == 151 - 150 // BLOCK * BLOCK
        assert answer.timings.decode_worker == "peer"
    pair.decode.worker.gate.draining = False
    assert answer.tokens() == await pair.right([*prompt, 8])


async def test_a_decode_worker_fetches_what_a_prefill_worker_failed_to_push(pair: Pair, model: Model) -> None:
    """The next attempt on the same reservation is LOCAL, and another worker has the prompt."""
    prompt = oracle.prompt_of(4, 150)
    async with running_worker(model, roles=("decode",), worker_id="peer", kv_pull="always") as peer:
        fleet = pair.mesh.router.core.fleet
        fleet._add(peer.info.address, static=True)
        await eventually(lambda: len(fleet.views()) == 3)
        pair.decode.worker.gate.draining = True
        await eventually(lambda: len(fleet.views()) == 2)
        await pair.answer([*prompt, 9], LOCAL)
        pair.decode.worker.gate.draining, peer.worker.gate.draining = False, True
        await eventually(lambda: [view.worker_id for view in fleet.views() if view.decode] == ["decode"])
        with armed("prefill.accepted=error@1"):
            answer = await pair.answer([*prompt, 8])
        puller = pair.decode.worker.puller
        assert puller is not None and puller.counts.num_tokens == 150 // BLOCK * BLOCK
        assert pair.decode.engine.stats().num_prefilled_tokens == 151 - 150 // BLOCK * BLOCK
        assert not len(pair.decode.engine._pool.claims)
        assert answer.timings.decode_worker == "decode"
    assert answer.tokens() == await pair.right([*prompt, 8])


async def test_no_tenant_fetches_what_another_one_has(pair: Pair) -> None:
    prompt = oracle.prompt_of(9, 150)
    await pair.answer(prompt, LOCAL, salt="one")
    await pair.answer([*prompt, 7], salt="another")
    assert pair.counts == (0, 0)
    await pair.answer([*prompt, 7], salt="one")
    assert pair.counts == (150 // BLOCK * BLOCK, 0)


async def test_equal_prompts_fetch_once(pair: Pair) -> None:
    prompt = oracle.prompt_of(10, 150)
    await pair.answer(prompt, LOCAL)
    answers = await asyncio.gather(*(pair.answer([*prompt, 7]) for _ in range(4)))
    assert pair.counts == (150 // BLOCK * BLOCK, 0)
    assert pair.prefill.worker.puller is not None
    assert pair.prefill.worker.puller.counts.num_pulls == 1
    right = await pair.right([*prompt, 7])
    assert all(answer.tokens() == right for answer in answers)


@pytest.mark.parametrize("ends", ["whole", "cancelled"])
async def test_a_prompt_that_the_holder_is_computing_is_computed_once(
    pair: Pair, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is what it has computed when it has computed all, or is not going to any more."""
    for number in range(3):  # so that the holder can tell how long a prompt takes
        await pair.answer(oracle.prompt_of(20 + number, 300), LOCAL)
    prompt, size, engine = oracle.prompt_of(11, 640), 640 // BLOCK * BLOCK, pair.decode.engine
    run_step = engine.run_step

    def slowly(step: EngineStep) -> None:
        time.sleep(0.1)
        run_step(step)

    monkeypatch.setattr(engine, "run_step", slowly)
    before, published = pair.num_prefilled, len(engine.published_blocks()[1])
    leading = asyncio.ensure_future(pair.answer(prompt, LOCAL))
    await eventually(lambda: len(engine.published_blocks()[1]) > published)
    following = asyncio.ensure_future(pair.answer([*prompt, 7]))
    await eventually(lambda: pair.decode.worker.block_sender.num_waits == 1)
    if ends == "cancelled":
        leading.cancel()
    answer = await following
    await asyncio.gather(leading, return_exceptions=True)
    monkeypatch.setattr(engine, "run_step", run_step)
    num_pulled, num_failed = pair.counts
    assert num_failed == 0 and pair.num_prefilled - before == 641 - num_pulled
    assert num_pulled == size if ends == "whole" else 0 < num_pulled < size
    assert answer.tokens() == await pair.right([*prompt, 7])


async def test_a_holder_that_says_for_ever_that_it_computes_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine hangs, or it lies."""
    await pair.answer(oracle.prompt_of(20, 300), LOCAL)
    prompt = oracle.prompt_of(13, 150)
    first = (await pair.answer(prompt, LOCAL)).tokens()
    monkeypatch.setattr(kv_send, "LONGEST_CALL_S", 0.01)

    async def coming(self: BuiltinSharing, first: int, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        return [(0, 64)]

    monkeypatch.setattr(BuiltinSharing, "coming", coming)
    longer = [*prompt, *first]
    answer = await pair.answer(longer)
    assert pair.counts == (0, 1)
    assert answer.tokens() == await pair.right(longer)


async def test_more_may_wait_for_blocks_than_are_sent_at_once(pair: Pair, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_send, "MOST_SENDS", 1)
    prompt = oracle.prompt_of(14, 150)
    first = (await pair.answer(prompt, LOCAL)).tokens()
    longer = [*prompt, *first]
    holder = prefill_pb2.KVHolder(address=pair.decode.info.address, epoch=pair.decode.info.epoch, num_tokens=9 * BLOCK)
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(running_worker(model, roles=("prefill",), worker_id=name, kv_pull="always"))
            for name in ("a", "b", "c")
        ]
        with armed("pull.send=delay:100"):
            came = await asyncio.gather(*(_pulled(peer, longer, holder) for peer in peers))
    assert came == [9 * BLOCK] * 3


async def _pulled(peer: Peer, tokens: Sequence[int], holder: prefill_pb2.KVHolder) -> int | None:
    assert peer.worker.puller is not None
    root = peer.worker._served_model.translate.cache_root("", scoped_salt("", ""))
    request = EngineRequest("r", tuple(tokens), SamplingParams(max_tokens=1), cache_root=root)
    return await peer.worker.puller.pull(request, holder)


@pytest.mark.parametrize("action", ["error@1", "delay:4000@1"])
async def test_a_pull_that_fails_or_is_late_is_computed(pair: Pair, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the holder's push that breaks, or stands still for longer than a pull is waited for; afterwards it is left out."""
    prompt = oracle.prompt_of(5, 150)
    first = (await pair.answer(prompt, LOCAL)).tokens()
    longer = [*prompt, *first]
    hurry(pair, monkeypatch)
    with armed(f"push.part={action}"):
        answer = await pair.answer(longer)
    assert answer.tokens() == await pair.right(longer)
    assert pair.counts == (0, 1)
    again = [*longer, *answer.tokens()]
    assert (await pair.answer(again)).tokens() == await pair.right(again)
    assert pair.counts == (0, 1), "it is not asked again so soon"


async def test_a_holder_that_is_gone_costs_nothing_but_the_computation(pair: Pair) -> None:
    """Its port is closed: the router's word is old."""
    engine_request = prefill_pb2.KVHolder(address="127.0.0.1:9", epoch=1, num_tokens=64)
    puller = pair.prefill.worker.puller
    assert puller is not None
    request = EngineRequest("r", tuple(oracle.prompt_of(6, 100)), SamplingParams(max_tokens=1))
    assert await puller.pull(request, engine_request) is None
    assert pair.counts == (0, 1)
    await pair.prefill.until_whole()


async def test_a_cancelled_pull_leaves_nothing(pair: Pair) -> None:
    prompt = oracle.prompt_of(7, 150)
    first = (await pair.answer(prompt, LOCAL)).tokens()
    with armed("push.part=delay:800@1"):
        asking = asyncio.ensure_future(pair.answer([*prompt, *first]))
        await eventually(lambda: bool(pair.decode.engine._allocator.pinned))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: not pair.decode.engine._allocator.pinned)
    await pair.prefill.until_whole()
    await pair.decode.until_whole()


async def test_questions_that_are_wrong_are_refused_by_field(pair: Pair) -> None:
    info = pair.decode.info
    right = worker_pb2.SendBlocksRequest(
        epoch=info.epoch,
        hashes=[b"x" * 16],
        identity=info.identity,
        reservation=common_pb2.Reservation(reservation_id=".1", epoch=1, attempt=1, token=b"x", layout=info.layout),
    )

    async def refused(code: grpc.StatusCode, words: str, **changes: object) -> None:
        wrong = worker_pb2.SendBlocksRequest()
        wrong.CopyFrom(right)
        for name, value in changes.items():
            wrong.ClearField(name)  # type: ignore[arg-type]
            if value is not None:
                wrong.MergeFrom(worker_pb2.SendBlocksRequest(**{name: value}))  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.decode.control.SendBlocks(wrong)
        assert (caught.value.code(), words in (caught.value.details() or "")) == (code, True), caught.value.details()

    await refused(grpc.StatusCode.FAILED_PRECONDITION, "epoch: ", epoch=5)
    await refused(grpc.StatusCode.INVALID_ARGUMENT, "hashes: ", hashes=None)
    await refused(grpc.StatusCode.INVALID_ARGUMENT, "hashes: ", hashes=[b""])
    await refused(grpc.StatusCode.INVALID_ARGUMENT, "reservation: missing", reservation=None)
    await refused(grpc.StatusCode.INVALID_ARGUMENT, "identity: missing", identity=None)
    await refused(grpc.StatusCode.FAILED_PRECONDITION, "identity.model", identity=common_pb2.Identity(model="another"))
    huge = common_pb2.Reservation(reservation_id=".1", epoch=1, attempt=1, token=b"x", layout=info.layout)
    huge.num_cached_tokens = 0xFFFFFFF0
    await refused(grpc.StatusCode.INVALID_ARGUMENT, "hashes: 1 blocks behind 4294967280 tokens", reservation=huge)
    await refused(grpc.StatusCode.INVALID_ARGUMENT, "wait_ms: ", wait_ms=60_001)
    await refused(grpc.StatusCode.NOT_FOUND, "hashes[0]: ")
    await refused(grpc.StatusCode.NOT_FOUND, "hashes[0]: ", wait_ms=60_000)
    odd = common_pb2.Reservation(reservation_id=".1", epoch=1, attempt=1, token=b"x", layout=info.layout, num_cached_tokens=3)
    await refused(grpc.StatusCode.INVALID_ARGUMENT, "reservation.num_cached_tokens: ", reservation=odd)
    await pair.decode.until_whole()
