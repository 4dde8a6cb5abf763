"""KV in a store that others share: what one worker computed, a worker of another host restores; a store that is slow, hangs or
ends is a smaller cache."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvtransfer.tiers.backends.store import StoreTier
from kvtransfer.tiers.settings import TierConfig
from kvtransfer.tiers.tiers import KVTiers
from pdmesh.engine.kv_cache.published_blocks import BlockName
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from router.config import RouterConfig
from router.telemetry.timings import RequestTimings
from tests.mesh import oracle
from tests.mesh.test_kv_tiers import BLOCK, LOCAL, running_pair, tiers_of, written
from tests.router.mesh import Answer, Mesh, running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, load_tiny
from tests.worker.test_process import process, ready

PROMPT = oracle.prompt_of(1, 100)
WHOLE = 100 // BLOCK


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_tiny(tiny)


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as server:
        yield server


def shared(server: EmbeddedRedis, **settings: object) -> TierConfig:
    return TierConfig(kv_store=server.url, kv_restore="always", **settings)  # type: ignore[arg-type]


def store_of(tiers: KVTiers) -> StoreTier:
    found = tiers.tiers[-1]
    assert isinstance(found, StoreTier)
    return found


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> list[common_pb2.PrefillTimings]:
    """Of each prompt, also of those that another process has computed."""
    seen = list[common_pb2.PrefillTimings]()
    prefilled = RequestTimings.prefilled

    def watched(self: RequestTimings, timings: common_pb2.PrefillTimings) -> None:
        seen.append(timings)
        prefilled(self, timings)

    monkeypatch.setattr(RequestTimings, "prefilled", watched)
    return seen


@asynccontextmanager
async def running_process(tiny: Path, folder: Path, server: EmbeddedRedis) -> AsyncIterator[Mesh]:
    """A worker process with a folder of its own, and a router in front of it."""
    flags = ("--model", str(tiny), "--num-blocks", "128", "--model-name", "tiny", "--num-threads", "1")
    tiers = ("--kv-disk", str(folder), "--kv-restore", "always")
    async with process("pdmesh.worker", *flags, *tiers, env={"PDMESH_KV_STORE": server.url}) as child:
        address = str((await ready(child))["address"])
        config = RouterConfig(port=0, models=(f"tiny={tiny}",), workers=(address,), drain_grace_s=0.3, linger_s=0.0)
        async with running_router(config) as (router, stub):
            await eventually(router.core.fleet.ready)
            yield Mesh(router, stub, {})
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await child.wait() == 0


async def ask(mesh: Mesh, prompt: Sequence[int]) -> Answer:
    sampling = common_pb2.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    options = mesh_pb2.RequestOptions(mode=LOCAL)
    return await mesh.generate(mesh_pb2.GenerateRequest(tokens=mesh_pb2.TokenIds(ids=prompt), sampling=sampling, options=options))


async def test_a_worker_of_another_host_restores_what_the_first_wrote(
    tiny: Path, tmp_path: Path, server: EmbeddedRedis, timings: list[common_pb2.PrefillTimings]
) -> None:
    async with running_process(tiny, tmp_path / "here", server) as mesh:
        first = await ask(mesh, PROMPT)
    assert (timings[-1].num_restored_tokens, timings[-1].num_computed_tokens) == (0, 100)
    async with Redis.from_url(server.url, protocol=2) as redis:  # it wrote all before it ended
        assert await redis.zcard("pdmesh:default:kv:used") >= WHOLE
    async with running_process(tiny, tmp_path / "there", server) as mesh:
        second = await ask(mesh, PROMPT)
        assert second.tokens() == first.tokens()
        assert (timings[-1].num_restored_tokens, timings[-1].num_computed_tokens) == (WHOLE * BLOCK, 100 - WHOLE * BLOCK)
        await ask(mesh, PROMPT)
        assert timings[-1].num_restored_tokens == 0  # the pool has it


async def test_compressed_blocks_give_the_same_tokens(model: Model, tiny: Path, tmp_path: Path, server: EmbeddedRedis) -> None:
    pytest.importorskip("zstandard", reason="the extra `compression` is not installed")
    async with running_pair(model, tiny, TierConfig()) as pair:
        right = await pair.answer(PROMPT)
    tiers = shared(server, kv_disk=str(tmp_path / "kv"), kv_tier_compression="zstd")
    async with running_pair(model, tiny, tiers) as pair:
        await pair.answer(PROMPT)
        await written(pair.prefill, WHOLE)
        block_bytes = tiers_of(pair.prefill)._tools.blocks.block_bytes
    async with Redis.from_url(server.url, protocol=2, decode_responses=True) as redis:
        sizes = await redis.hgetall("pdmesh:default:kv:sizes")
    total = int(sizes.pop(""))  # of the answer's blocks, too, as far as they were written
    assert len(sizes) >= WHOLE and total == sum(map(int, sizes.values())) < 0.9 * len(sizes) * block_bytes
    for settings in (tiers, shared(server)):
        async with running_pair(model, tiny, settings) as pair:
            assert (await pair.answer(PROMPT)).tokens() == right.tokens()
            assert tiers_of(pair.prefill).counts.num_tokens == WHOLE * BLOCK


async def test_the_router_is_told_of_what_was_found(model: Model, tiny: Path, server: EmbeddedRedis) -> None:
    async with running_pair(model, tiny, shared(server)) as pair:
        right = await pair.answer(PROMPT)
        await written(pair.prefill, WHOLE)
    async with running_pair(model, tiny, shared(server)) as pair:
        assert not tiers_of(pair.prefill).held
        assert (await pair.answer(PROMPT)).tokens() == right.tokens()
        assert tiers_of(pair.prefill).counts.num_tokens == WHOLE * BLOCK
        await eventually(lambda: len(tiers_of(pair.prefill).held) == WHOLE)
        [part] = [part async for part in pair.prefill.control.ListBlocks(worker_pb2.ListBlocksRequest())]
        assert set(part.tier_blocks) == set(part.blocks) and len(part.tier_blocks) == WHOLE


async def test_a_damaged_value_is_computed_and_written_anew(model: Model, tiny: Path, server: EmbeddedRedis) -> None:
    """The third block of six: the first two are restored."""
    async with running_pair(model, tiny, shared(server)) as pair:
        right = await pair.answer(PROMPT)
        await written(pair.prefill, WHOLE)
        [root] = {name.root for name in tiers_of(pair.prefill).told}
        third = bytes(pair.prefill.engine.sharing.lacking(root, PROMPT)[1][2])
    async with running_pair(model, tiny, shared(server)) as pair, Redis.from_url(server.url, protocol=2) as redis:
        store = store_of(tiers_of(pair.prefill))
        key = f"pdmesh:default:kv:{store._key(BlockName(root, b'', third))}"
        whole = await redis.get(key)
        await redis.setrange(key, 1000, b"damaged")
        assert (await pair.answer(PROMPT)).tokens() == right.tokens()
        assert tiers_of(pair.prefill).counts.num_tokens == 2 * BLOCK and store.counts.num_corrupt == 1
        await written(pair.prefill, WHOLE)
        assert await redis.get(key) == whole


@pytest.mark.parametrize("what", ["stopped", "hanging"])
async def test_requests_compute_where_the_store_does_not_answer(
    model: Model, tiny: Path, server: EmbeddedRedis, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair(model, tiny, shared(server)) as pair:
        right = await pair.answer(PROMPT)
        await written(pair.prefill, WHOLE)
    async with running_pair(model, tiny, shared(server)) as pair:
        tiers, pid, port = tiers_of(pair.prefill), server.pid, server.port
        if what == "stopped":
            await server.stop()
        else:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert (await pair.answer(PROMPT)).tokens() == right.tokens()
            assert (tiers.counts.num_tokens, tiers.counts.num_late) == (0, what == "hanging")
            await eventually(lambda: not store_of(tiers).is_available)
            other = oracle.prompt_of(2, 60)
            await pair.answer(other)
            assert tiers.counts.num_late == (what == "hanging")  # it is not asked
        finally:
            if what == "hanging":
                os.kill(pid, signal.SIGCONT)
        if what == "stopped":
            await server.stop()
            again = EmbeddedRedis(port)
            await again.start()
        try:
            store_of(tiers)._not_before = tiers._rates["store"].not_before = 0.0
            last = oracle.prompt_of(3, 60)
            await pair.answer(last)
            await eventually(lambda: store_of(tiers).num_blocks >= 60 // BLOCK)
        finally:
            if what == "stopped":
                await again.stop()


async def test_a_worker_ends_while_its_store_hangs(model: Model, tiny: Path, server: EmbeddedRedis) -> None:
    async with running_pair(model, tiny, shared(server)) as pair:
        await pair.answer(PROMPT)
        os.kill(server.pid, signal.SIGSTOP)
        await pair.answer(oracle.prompt_of(2, 100))
        await eventually(lambda: not tiers_of(pair.prefill).is_moving)
    os.kill(server.pid, signal.SIGCONT)


def _computed_in(token_s: float, first: int, last: int) -> float:
    return token_s * (last - first)


async def test_a_store_is_asked_only_where_it_would_pay(
    model: Model, tiny: Path, server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    find = StoreTier.find

    def watched(self: StoreTier, names: Sequence[BlockName], *, all_of_them: bool = False) -> None:
        asked.append(len(names))
        find(self, names, all_of_them=all_of_them)

    monkeypatch.setattr(StoreTier, "find", watched)
    async with running_pair(model, tiny, TierConfig(kv_store=server.url)) as pair:
        tiers = tiers_of(pair.prefill)
        for token_s, is_asked in ((1e-9, False), (10.0, True)):
            compute_s = partial(_computed_in, token_s)
            monkeypatch.setattr(tiers, "_tools", replace(tiers._tools, compute_s=compute_s))
            await pair.answer(oracle.prompt_of(3 + is_asked, 100))
            assert bool(asked) == is_asked
