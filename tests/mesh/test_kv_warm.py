"""A worker that starts is warmed: it has the most used prefixes of its peers before its first request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvtransfer.tiers.settings import TierConfig
from pdmesh.runtime import failpoints
from pdmesh.v1 import worker_pb2
from prefill_service import kv_warm
from router.kv_index.hot_prefixes import block_kind
from router.tokenization.prepared_request import scoped_salt
from tests.mesh import oracle
from tests.mesh.test_kv_pull import BLOCK, LOCAL, Pair, armed, running_pair
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker, token_request

SHARED = oracle.prompt_of(30, 6 * BLOCK)
ANOTHER = oracle.prompt_of(31, 4 * BLOCK)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_tiny(tiny)


@pytest.fixture
async def pair(model: Model, tiny: Path) -> AsyncIterator[Pair]:
    async with running_pair(model, tiny, {}) as made:
        yield made


@pytest.fixture
async def cold(model: Model) -> AsyncIterator[Peer]:
    async with running_worker(model, roles=("prefill",), worker_id="cold") as peer:
        yield peer


def asking(cold: Peer, holder: Peer, prompt: list[int], tenant: str = "", salt: str = "") -> worker_pb2.WarmPrefixRequest:
    request = token_request(prompt)
    request.tenant, request.cache_salt = tenant, salt
    return worker_pb2.WarmPrefixRequest(
        epoch=cold.info.epoch, request=request, holder_address=holder.info.address, holder_epoch=holder.info.epoch
    )


def num_held(peer: Peer) -> int:
    return peer.engine.stats().num_cached_blocks


@asynccontextmanager
async def held(name: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The first hit of a failpoint lasts until this ends."""
    released, really, hits = asyncio.Event(), failpoints.hit_async, list[str]()

    async def hit(which: str) -> None:
        await really(which)
        hits.append(which)
        if which == name and hits.count(name) == 1:
            await released.wait()

    monkeypatch.setattr(failpoints, "hit_async", hit)
    try:
        yield
    finally:
        released.set()
    assert name in hits


@asynccontextmanager
async def joining(pair: Pair, peer: Peer) -> AsyncIterator[None]:
    """A worker that the router finds now. What is fetched is chosen now, too: it might have been chosen for one of the pair,
    seconds ago and of half of the requests."""
    pair.mesh.router.warming._hot.clear()
    fleet, num_before = pair.mesh.router.core.fleet, len(pair.mesh.router.core.fleet.views())
    fleet._add(peer.info.address, static=True)
    await eventually(lambda: len(fleet.views()) == num_before + 1)
    yield


async def test_a_worker_that_starts_has_the_shared_prompts_before_its_first_request(pair: Pair, cold: Peer) -> None:
    for number in range(3):
        await pair.answer([*SHARED, *oracle.prompt_of(40 + number, 40)])
    for number in range(2):
        await pair.answer([*ANOTHER, *oracle.prompt_of(50 + number, 40)], LOCAL)
    await pair.answer(oracle.prompt_of(60, 100))  # of one request alone
    async with joining(pair, cold):
        puller = cold.worker.puller
        assert puller is not None
        await eventually(lambda: puller.counts.num_warmed_tokens == len(SHARED) + len(ANOTHER))
        assert num_held(cold) == (len(SHARED) + len(ANOTHER)) // BLOCK
        assert puller.counts.num_warmed_bytes > 0
        assert cold.engine.stats().num_prefilled_tokens == 0
        index, warm = pair.mesh.router.core.prefixes, (cold.info.address, cold.info.epoch)
        hot = index.recent.hottest(block_kind(cold.info), 100, time.monotonic())
        assert [len(prefix.names) for prefix in hot] == [len(SHARED) // BLOCK, len(ANOTHER) // BLOCK]
        await eventually(lambda: [index.holders(prefix.names).get(warm) for prefix in hot] == [6, 4])
        pair.prefill.worker.gate.draining = True
        await eventually(lambda: len(pair.mesh.router.core.fleet.views()) == 2)
        prompt = [*SHARED, *oracle.prompt_of(70, 30)]
        answer = await pair.answer(prompt)
        assert answer.timings.prefill_worker == "cold"
        assert cold.engine.stats().num_prefilled_tokens == 30
        assert (puller.counts.num_tokens, puller.counts.num_failed) == (0, 0)
        await eventually(lambda: not pair.mesh.router.warming._tasks)
    pair.prefill.worker.gate.draining = False
    assert answer.tokens() == await pair.right(prompt)


async def test_a_prefix_of_a_tenant_is_warm_for_that_tenant_alone(pair: Pair, cold: Peer) -> None:
    for number in range(2):
        await pair.answer([*SHARED, number + 1], salt="one")
    async with joining(pair, cold):
        await eventually(lambda: num_held(cold) == 6)
        await eventually(lambda: not pair.mesh.router.warming._tasks)
        assert (
            await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED, salt=scoped_salt("", "one")))
        ).num_cached_tokens == len(SHARED)
        told = await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED, salt=scoped_salt("", "another")))
        assert (told.num_tokens, told.num_cached_tokens) == (0, 0)


async def test_a_worker_takes_its_share_and_no_more(pair: Pair, model: Model) -> None:
    await pair.answer([*SHARED, 7])
    async with running_worker(model, roles=("prefill",), warm_share=4 / 128) as cold:
        assert cold.info.warm_blocks == 4
        told = await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED))
        assert (told.num_tokens, told.num_cached_tokens, told.is_over) == (4 * BLOCK, 4 * BLOCK, True)
        assert num_held(cold) == 4
        told = await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED))
        assert (told.num_tokens, told.is_over) == (0, True)


async def test_a_prefix_comes_in_parts_and_none_of_it_twice(pair: Pair, cold: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_warm, "PART_BYTES", 1)
    await pair.answer([*SHARED, 7])
    half = SHARED[: 3 * BLOCK]
    assert (await cold.control.WarmPrefix(asking(cold, pair.prefill, half))).num_tokens == len(half)
    assert (await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED))).num_tokens == len(SHARED) - len(half)
    told = await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED))
    assert (told.num_tokens, told.num_cached_tokens, told.is_over) == (0, len(SHARED), False)
    assert pair.prefill.worker.block_sender.num_blocks_sent == len(SHARED) // BLOCK


async def test_nothing_is_taken_from_the_workers_own_prefixes(pair: Pair, model: Model) -> None:
    """Its pool is full of what its requests have used: that stays."""
    await pair.answer([*SHARED, 7])
    async with running_worker(model, roles=("prefill", "decode"), worker_id="used", engine={"num_blocks": 24}) as used:
        fleet = pair.mesh.router.core.fleet
        fleet._add(used.info.address, static=True)
        await eventually(lambda: len(fleet.views()) == 3)
        pair.decode.worker.gate.draining = True
        await eventually(lambda: len(fleet.views()) == 2)
        await pair.answer(oracle.prompt_of(80, 14 * BLOCK), LOCAL)
        before = set(used.engine.published_blocks()[1])
        assert len(before) >= 14
        told = await used.control.WarmPrefix(asking(used, pair.prefill, SHARED))
        assert (told.num_tokens, told.is_over) == (0, True)
        assert set(used.engine.published_blocks()[1]) == before
    pair.decode.worker.gate.draining = False


async def test_a_holder_that_is_gone_or_breaks_off_is_left_out(pair: Pair, cold: Peer) -> None:
    await pair.answer([*SHARED, 7])
    gone = asking(cold, pair.prefill, SHARED)
    gone.holder_address = "127.0.0.1:9"
    assert (await cold.control.WarmPrefix(gone)).num_tokens == 0
    with armed("push.part=error@1"):
        assert (await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED))).num_tokens == 0
    assert (await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED))).num_tokens == 0, "it is not asked so soon"
    assert (await cold.control.WarmPrefix(asking(cold, pair.decode, SHARED))).num_tokens == len(SHARED)
    await cold.until_whole()


async def test_one_prefix_comes_at_a_time_and_behind_what_requests_wait_for(
    pair: Pair, cold: Peer, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.answer([*SHARED, 7])
    await pair.answer([*ANOTHER, 7])
    async with running_worker(model, roles=("prefill",), worker_id="second") as second:
        async with held("pull.send", monkeypatch):
            first = asyncio.ensure_future(cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED)))
            await eventually(lambda: bool(pair.prefill.engine._allocator.pinned))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cold.control.WarmPrefix(asking(cold, pair.prefill, ANOTHER))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await second.control.WarmPrefix(asking(second, pair.prefill, SHARED))).num_tokens == 0, "the holder is busy"
            assert not first.done()
        assert (await first).num_tokens == len(SHARED)


async def test_a_request_does_not_wait_for_what_comes_in_the_background(
    pair: Pair, cold: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fetches, or computes, the same itself."""
    await pair.answer([*SHARED, 7])
    async with joining(pair, cold):
        pair.prefill.worker.gate.draining = True
        await eventually(lambda: len(pair.mesh.router.core.fleet.views()) == 2)
        async with held("pull.send", monkeypatch):
            warming = asyncio.ensure_future(cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED)))
            await eventually(lambda: bool(pair.prefill.engine._allocator.pinned))
            answer = await pair.answer([*SHARED, 8])
            assert answer.timings.prefill_worker == "cold"
            assert not warming.done()
        assert (await warming).num_cached_tokens == len(SHARED)
        pair.prefill.worker.gate.draining = False
        assert answer.tokens() == await pair.right([*SHARED, 8])


async def test_a_worker_takes_its_own_tier_before_others(pair: Pair, model: Model, tmp_path: Path) -> None:
    """A restarted worker has its disk."""
    tiers = TierConfig(kv_disk=str(tmp_path), kv_disk_gb=0.1, kv_restore="always")
    await pair.answer([*SHARED, 7])
    async with running_worker(model, roles=("prefill",), tiers=tiers) as before:
        assert (await before.control.WarmPrefix(asking(before, pair.prefill, SHARED))).num_tokens == len(SHARED)
        assert before.worker.tiers is not None
        await eventually(lambda: len(before.worker.tiers.held) == 6)  # type: ignore[union-attr]
    async with running_worker(model, roles=("prefill",), tiers=tiers) as again:
        assert (await again.control.WarmPrefix(asking(again, pair.prefill, SHARED))).num_tokens == len(SHARED)
        assert again.worker.puller is not None
        assert again.worker.puller.counts.num_warmed_tokens == 0
        assert again.worker.tiers is not None
        assert again.worker.tiers.counts.num_tokens == len(SHARED)


async def test_a_worker_that_takes_nothing_says_so(pair: Pair, model: Model) -> None:
    for settings in ({"warm_share": 0.0}, {"kv_pull": "off"}):
        async with running_worker(model, roles=("prefill",), **settings) as cold:
            assert cold.info.warm_blocks == 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cold.control.WarmPrefix(asking(cold, pair.prefill, SHARED))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


Change = Callable[[worker_pb2.WarmPrefixRequest], object]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda asked: setattr(asked, "epoch", 5), "FAILED_PRECONDITION", "epoch: 0x5"),
        (lambda asked: asked.ClearField("holder_address"), "INVALID_ARGUMENT", "holder_address: missing"),
        (lambda asked: asked.ClearField("holder_epoch"), "INVALID_ARGUMENT", "holder_epoch: missing"),
        (lambda asked: asked.ClearField("request"), "INVALID_ARGUMENT", "request: missing"),
        (lambda asked: asked.request.emitted.add(), "INVALID_ARGUMENT", "request.emitted: "),
        (lambda asked: asked.request.prompt_token_ids.append(1), "INVALID_ARGUMENT", "request.prompt_token_ids: 97 tokens"),
        (lambda asked: asked.request.ClearField("prompt_token_ids"), "INVALID_ARGUMENT", "request.prompt_token_ids: empty"),
        (lambda asked: asked.request.prompt_token_ids.__setitem__(0, 1 << 30), "INVALID_ARGUMENT", "request: "),
        (lambda asked: asked.request.prompt_token_ids.extend([1] * (1 << 16)), "INVALID_ARGUMENT", "request.prompt_token_ids: "),
        (lambda asked: setattr(asked.request, "model", "else"), "FAILED_PRECONDITION", "request.model: "),
        (lambda asked: setattr(asked.request, "adapter", "else"), "FAILED_PRECONDITION", "request.adapter: "),
        (lambda asked: asked.request.ClearField("sampling"), "INVALID_ARGUMENT", "request.sampling.seed: missing"),
    ],
)
async def test_questions_that_are_wrong_are_refused_by_field(cold: Peer, change: Change, code: str, words: str) -> None:
    asked = asking(cold, cold, SHARED)
    change(asked)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cold.control.WarmPrefix(asked)
    assert (caught.value.code().name, words in (caught.value.details() or "")) == (code, True), caught.value.details()
    await cold.until_whole()
