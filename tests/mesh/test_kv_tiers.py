"""KV on tiers: what a worker computed before a restart, or before its pool lost it, comes back from host memory or disk."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.kv_sources import Brought
from kvtransfer.tiers import reuse, write_behind
from kvtransfer.tiers.backends.disk import DiskTier
from kvtransfer.tiers.base import BlockBytes
from kvtransfer.tiers.settings import TierConfig
from kvtransfer.tiers.tiers import KVTiers
from pdmesh.engine.kv_cache.published_blocks import BlockName
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime import failpoints
from pdmesh.runtime.config import ConfigError
from pdmesh.v1 import common_pb2, mesh_pb2, prefill_pb2, worker_pb2
from router.config import RouterConfig
from router.telemetry.timings import RequestTimings
from tests.mesh import oracle
from tests.router.mesh import Answer, Mesh, running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker

BLOCK = 16
REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_tiny(tiny)


class Pair:
    """A prefill worker and a decode worker, and a router in front of both."""

    def __init__(self, mesh: Mesh, prefill: Peer, decode: Peer) -> None:
        self.mesh, self.prefill, self.decode = mesh, prefill, decode

    async def answer(
        self, prompt: Sequence[int], mode: mesh_pb2.PrefillMode.ValueType = REMOTE, salt: str = "", **sampling: Any
    ) -> Answer:
        wanted = common_pb2.SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **sampling})
        options = mesh_pb2.RequestOptions(mode=mode, cache_salt=salt)
        request = mesh_pb2.GenerateRequest(tokens=mesh_pb2.TokenIds(ids=prompt), sampling=wanted, options=options)
        return await self.mesh.generate(request)


@asynccontextmanager
async def running_pair(model: Model, tiny: Path, tiers: TierConfig, **overrides: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        prefill, decode = [
            await stack.enter_async_context(
                running_worker(model, roles=(role,), worker_id=role, kv_pull="off", tiers=tiers, transports=("tcp",), **overrides)
            )
            for role in ("prefill", "decode")
        ]
        workers = (prefill.info.address, decode.info.address)
        config = RouterConfig(port=0, models=(f"tiny={tiny}",), workers=workers, drain_grace_s=0.3, linger_s=0.0, hedge_share=0.0)
        router, stub = await stack.enter_async_context(running_router(config))
        await eventually(router.core.fleet.ready)
        yield Pair(Mesh(router, stub, {}), prefill, decode)


def tiers_of(peer: Peer) -> KVTiers:
    found = peer.worker.tiers
    assert found is not None
    return found


async def written(peer: Peer, num_blocks: int) -> None:
    """Wait until the last tier has so many blocks."""
    await eventually(lambda: tiers_of(peer).tiers[-1].num_blocks >= num_blocks)


def on_disk(tmp_path: Path, **settings: Any) -> TierConfig:
    return TierConfig(kv_disk=str(tmp_path / "kv"), kv_restore="always", **settings)


@pytest.mark.parametrize("mode", [REMOTE, LOCAL])
async def test_a_restarted_worker_finds_its_blocks_again(
    model: Model, tiny: Path, tmp_path: Path, mode: mesh_pb2.PrefillMode.ValueType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[common_pb2.PrefillTimings]()
    prefilled = RequestTimings.prefilled

    def watched(self: RequestTimings, timings: common_pb2.PrefillTimings) -> None:
        seen.append(timings)
        prefilled(self, timings)

    monkeypatch.setattr(RequestTimings, "prefilled", watched)
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        computes = pair.prefill if mode is REMOTE else pair.decode
        first = await pair.answer(prompt, mode)
        assert tiers_of(computes).counts.num_tokens == 0
        await written(computes, 100 // BLOCK)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        computes = pair.prefill if mode is REMOTE else pair.decode
        before = computes.engine.stats().num_prefilled_tokens
        second = await pair.answer(prompt, mode)
        assert second.tokens() == first.tokens()
        assert computes.engine.stats().num_prefilled_tokens - before == 100 - 100 // BLOCK * BLOCK
        assert tiers_of(computes).counts.num_tokens == 100 // BLOCK * BLOCK
        assert seen[-1].num_restored_tokens == 100 // BLOCK * BLOCK and seen[-1].restore_ns > 0
        assert seen[-1].num_computed_tokens == 100 - 100 // BLOCK * BLOCK


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5, "n": 2}], ids=["greedy", "seeded, two choices"])
@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_what_the_pool_has_lost_comes_back_and_gives_the_same_tokens(
    model: Model, tiny: Path, tmp_path: Path, tier: str, sampling: dict[str, Any]
) -> None:
    tiers = TierConfig(kv_host_gb=0.01, kv_restore="always") if tier == "host" else on_disk(tmp_path)
    prompts = [oracle.prompt_of(number, 150) for number in range(6)]
    async with running_pair(model, tiny, tiers, engine={"num_blocks": 40}) as pair:
        first = [await pair.answer(prompt, **sampling) for prompt in prompts]
        await written(pair.prefill, 6 * (150 // BLOCK))
        again = [await pair.answer(prompt, **sampling) for prompt in prompts]
        counts = tiers_of(pair.prefill).counts
        for one, other in zip(first, again, strict=True):
            assert [one.tokens(choice) for choice in range(2)] == [other.tokens(choice) for choice in range(2)]
        assert counts.num_tokens >= 3 * (150 // BLOCK) * BLOCK and counts.num_late == 0
        assert tiers_of(pair.prefill).tiers[0].counts.num_corrupt == 0


@pytest.mark.parametrize("writes", ["auto", "always"])
async def test_what_is_not_used_again_is_not_written_until_it_is(
    model: Model, tiny: Path, tmp_path: Path, writes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "LEAST_OUTCOMES", 6)
    monkeypatch.setattr(reuse, "PATIENCE_S", 0.0)
    async with running_pair(model, tiny, on_disk(tmp_path, kv_write=writes)) as pair:
        await pair.answer(oracle.prompt_of(1, 100))
        await written(pair.prefill, num := 100 // BLOCK)
        await pair.answer(oracle.prompt_of(2, 100))
        await tiers_of(pair.prefill).flush()
        num_expected = num if writes == "auto" else 2 * num
        assert tiers_of(pair.prefill).tiers[-1].num_blocks == num_expected
        await pair.answer([*oracle.prompt_of(2, 100), 7])
        await written(pair.prefill, 2 * num)


async def test_other_salts_and_cut_chains_restore_nothing(model: Model, tiny: Path, tmp_path: Path) -> None:
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        right = await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        assert (await pair.answer(prompt, salt="other")).tokens() == right.tokens()
        assert tiers_of(pair.prefill).counts.num_tokens == 0
        assert (await pair.answer([9, *prompt])).tokens()
        assert tiers_of(pair.prefill).counts.num_tokens == 0
        half = [*prompt[:40], *oracle.prompt_of(2, 60)]
        await pair.answer(half)
        assert tiers_of(pair.prefill).counts.num_tokens == 32


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("damage", [damaged, cut, Path.unlink])
async def test_damaged_blocks_are_computed_and_counted(
    model: Model, tiny: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """The third block of six: the first two are restored."""
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        right = await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
        third = bytes(pair.prefill.engine.sharing.lacking(*root_and_tokens(pair, prompt))[1][2]).hex()
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        [path] = (tmp_path / "kv").rglob(f"{third}.*.kv")
        damage(path)
        assert (await pair.answer(prompt)).tokens() == right.tokens()
        tiers = tiers_of(pair.prefill)
        assert tiers.counts.num_tokens == 2 * BLOCK
        assert tiers.tiers[0].counts.num_corrupt == (damage is not Path.unlink)
        await written(pair.prefill, 100 // BLOCK)  # it is written anew


def root_and_tokens(pair: Pair, prompt: Sequence[int]) -> tuple[bytes, Sequence[int]]:
    """The chain of what lies on disk: there is one root in these tests."""
    [root] = {name.root for name in tiers_of(pair.prefill).told}
    return root, prompt


async def test_a_disk_that_hangs_delays_no_longer_than_computing_takes(
    model: Model, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        right = await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
    ended = threading.Event()
    lend = DiskTier.lend

    def hang(self: DiskTier, name: BlockName) -> BlockBytes | None:
        ended.wait(60.0)
        return lend(self, name)

    monkeypatch.setattr("kvtransfer.tiers.tiers.FORCED_LIMIT_S", 0.2)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        tiers = tiers_of(pair.prefill)
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, "lend", hang)
            assert (await pair.answer(prompt)).tokens() == right.tokens()
            assert (tiers.counts.num_late, tiers.counts.num_tokens) == (1, 0)
            other = oracle.prompt_of(1, 60)
            await pair.answer(other)  # the tier is left out for now
            assert tiers.counts.num_late == 1
            ended.set()
        await eventually(lambda: not any(disk_of(tiers)._index.is_held(name) for name in tiers.told))
        await eventually(lambda: pair.prefill.engine.stats().num_free_blocks == 128)


def disk_of(tiers: KVTiers) -> DiskTier:
    [tier] = tiers.tiers
    assert isinstance(tier, DiskTier)
    return tier


async def test_equal_prompts_at_once_are_restored_once(model: Model, tiny: Path, tmp_path: Path) -> None:
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        right = await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        answers = await asyncio.gather(*(pair.answer(prompt) for _ in range(4)))
        assert {tuple(answer.tokens()) for answer in answers} == {tuple(right.tokens())}
        counts = tiers_of(pair.prefill).counts
        assert (counts.num_restores, counts.num_tokens) == (1, 100 // BLOCK * BLOCK)


async def test_a_request_that_is_cancelled_while_it_is_restored_leaves_nothing(
    model: Model, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
    may_go_on, lend = threading.Event(), DiskTier.lend

    def slow(self: DiskTier, name: BlockName) -> BlockBytes | None:
        may_go_on.wait(60.0)
        return lend(self, name)

    monkeypatch.setattr(DiskTier, "lend", slow)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        call = asyncio.ensure_future(pair.answer(prompt))
        await eventually(lambda: tiers_of(pair.prefill).is_moving)
        call.cancel()
        await asyncio.wait([call])
        await eventually(lambda: not tiers_of(pair.prefill).is_moving)
        may_go_on.set()
        tiers = tiers_of(pair.prefill)
        await eventually(lambda: not any(disk_of(tiers)._index.is_held(name) for name in tiers.told))
        await eventually(lambda: pair.prefill.engine.stats().num_free_blocks == 128)
        assert tiers.counts.num_tokens == 0


async def test_routers_are_told_what_tiers_hold(model: Model, tiny: Path, tmp_path: Path) -> None:
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
        await eventually(lambda: len(tiers_of(pair.prefill).held) == 100 // BLOCK)
        parts = [part async for part in pair.prefill.control.ListBlocks(worker_pb2.ListBlocksRequest())]
        assert len(parts) == 1 and set(parts[0].tier_blocks) == set(parts[0].blocks) and len(parts[0].tier_blocks) == 6
        assert pair.prefill.info.restore_token_s > 0
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:  # known before any request
        num_files = len(list((tmp_path / "kv").rglob("*.kv")))
        assert num_files > 6  # those of the decode worker, too
        await eventually(lambda: len(tiers_of(pair.prefill).held) == num_files)
        [part] = [part async for part in pair.prefill.control.ListBlocks(worker_pb2.ListBlocksRequest())]
        assert len(part.tier_blocks) == num_files and not part.blocks


async def test_routers_are_told_how_fast_tiers_have_proved(model: Model, tiny: Path, tmp_path: Path) -> None:
    """What is assumed when a worker starts holds no longer than until something was read."""
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        tiers, seen = tiers_of(pair.prefill), pair.mesh.router.core.fleet.workers[pair.prefill.info.address]

        def known_s() -> float:
            return seen.view.restore_token_s if seen.view is not None else 0.0

        await eventually(lambda: known_s() == pytest.approx(pair.prefill.info.restore_token_s, rel=0.25))
        for _ in range(30):
            tiers._rates["disk"].came(1 << 20, 1.0, time.monotonic())
        await eventually(lambda: known_s() > 4 * pair.prefill.info.restore_token_s)  # it forgets what it has learned
        tiers._switch_off()
        await eventually(lambda: known_s() == 0.0)


async def test_an_attempt_that_turns_local_restores_too(
    model: Model, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker has its reservation since before the prefill worker failed."""
    prompt, seen, prefilled = oracle.prompt_of(1, 100), list[common_pb2.PrefillTimings](), RequestTimings.prefilled

    def watched(self: RequestTimings, timings: common_pb2.PrefillTimings) -> None:
        seen.append(timings)
        prefilled(self, timings)

    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        first = await pair.answer(prompt, LOCAL)
        await written(pair.decode, 100 // BLOCK)
    monkeypatch.setattr(RequestTimings, "prefilled", watched)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        failpoints.install("prefill.accepted=error@1")
        second = await pair.answer(prompt)
        failpoints.install("")
        assert second.tokens() == first.tokens()
        assert pair.decode.engine.stats().num_prefilled_tokens == 100 % BLOCK
        assert seen[-1].num_restored_tokens == seen[-1].num_cached_tokens == 100 // BLOCK * BLOCK
        assert not len(pair.decode.engine._pool.claims)


async def test_what_was_restored_is_there_when_the_engine_takes_the_request(
    model: Model, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that come first use the whole pool meanwhile, and evict all but what was restored."""
    prompt, others = oracle.prompt_of(1, 100), [oracle.prompt_of(number, 100) for number in range(2, 26)]
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        sources = pair.prefill.worker._sources
        assert sources is not None
        bring, num_calls, pool = sources.bring, itertools.count(), pair.prefill.engine._pool

        async def brought_early(request: EngineRequest, holder: prefill_pb2.KVHolder | None) -> Brought:
            brought = await bring(request, holder)
            if not next(num_calls):
                for other in others:
                    await pair.answer(other, max_tokens=2)
            return brought

        monkeypatch.setattr(sources, "bring", brought_early)
        before = pair.prefill.engine.stats().num_prefilled_tokens
        await pair.answer(prompt)
        computed = pair.prefill.engine.stats().num_prefilled_tokens - before
        assert len(others) * (100 // BLOCK) > pool.num_total, "others have not used the whole pool"
        assert computed == 100 * len(others) + 100 % BLOCK
        assert not len(pool.claims)


def computed_s(token_s: float, first: int, last: int) -> float:
    return token_s * (last - first)


async def test_by_default_what_is_quicker_to_compute_is_computed(model: Model, tiny: Path, tmp_path: Path) -> None:
    prompts = [oracle.prompt_of(number, 40) for number in (1, 2)]
    tiers = TierConfig(kv_disk=str(tmp_path / "kv"))
    async with running_pair(model, tiny, tiers) as pair:
        for prompt in prompts:
            await pair.answer(prompt)
        await written(pair.prefill, 4)
    async with running_pair(model, tiny, tiers) as pair:
        found = tiers_of(pair.prefill)
        for prompt, token_s, num_tokens in zip(prompts, (1e-6, 10.0), (0, 32), strict=True):
            computing = replace(found._tools, compute_s=partial(computed_s, token_s))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(found, "_tools", computing)
                await pair.answer(prompt)
            assert found.counts.num_tokens == num_tokens


async def test_withdrawn_blocks_are_forgotten_and_not_restored(model: Model, tiny: Path, tmp_path: Path) -> None:
    """Their KV is not finite: it would end the next request with the same prompt, too."""
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        right = await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
        tiers, allocator = tiers_of(pair.prefill), pair.prefill.engine._allocator
        await eventually(lambda: len(tiers.told) == 100 // BLOCK)
        names = sorted(tiers.told, key=lambda name: name.block_hash)
        with allocator.lock:
            allocator.pool.withdraw([allocator.pool._block_of[name.block_hash] for name in names])
            assert allocator.published is not None
            allocator.published.withdraw(names)
        await eventually(lambda: not tiers.told)
        assert (await pair.answer(prompt)).tokens() == right.tokens()
        assert tiers.counts.num_tokens == 0
        await written(pair.prefill, 100 // BLOCK)  # what was computed anew is kept again


async def test_a_disk_that_hangs_takes_no_other_tier_with_it(
    model: Model, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, write = threading.Event(), DiskTier.write

    def hang(self: DiskTier, name: BlockName, block: BlockBytes, keep_s: float) -> None:
        ended.wait(60.0)
        write(self, name, block, keep_s)

    monkeypatch.setattr(DiskTier, "write", hang)
    monkeypatch.setattr(write_behind, "WAIT_S", 0.1)
    prompts = [oracle.prompt_of(number, 150) for number in range(6)]
    async with running_pair(model, tiny, on_disk(tmp_path, kv_host_gb=0.01), engine={"num_blocks": 40}) as pair:
        host, disk = tiers_of(pair.prefill).tiers
        first = list[Answer]()
        for prompt in prompts:
            first.append(await pair.answer(prompt))
            # Else a fast engine gives the blocks to the next prompts before they are copied.
            await eventually(lambda: host.num_blocks == len(first) * (150 // BLOCK))
        assert disk.num_blocks == 0
        again = [await pair.answer(prompt) for prompt in prompts]
        assert [one.tokens() for one in again] == [one.tokens() for one in first]
        assert tiers_of(pair.prefill).counts.num_tokens > 0 and host.counts.num_read > 0
        await eventually(lambda: len(tiers_of(pair.prefill).told) == 6 * (150 // BLOCK))
        ended.set()


async def test_a_bug_of_a_tier_costs_the_tiers_and_no_request(
    model: Model, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: DiskTier, names: Sequence[BlockName]) -> list[bool]:
        raise ZeroDivisionError("a bug")

    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        right = await pair.answer(prompt)
        await written(pair.prefill, 100 // BLOCK)
        monkeypatch.setattr(DiskTier, "holds", fail)
        for last in (7, 8):
            assert (await pair.answer([*prompt, last])).tokens()
        assert "ZeroDivisionError: a bug" in caplog.text and "are not used any more" in caplog.text
        assert (await pair.answer(prompt)).tokens() == right.tokens()


async def test_a_local_request_is_cancelled_while_a_disk_hangs(
    model: Model, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = oracle.prompt_of(1, 100)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        right = await pair.answer(prompt, LOCAL)
        await written(pair.decode, 100 // BLOCK)
    may_go_on, lend = threading.Event(), DiskTier.lend

    def slow(self: DiskTier, name: BlockName) -> BlockBytes | None:
        may_go_on.wait(60.0)
        return lend(self, name)

    monkeypatch.setattr(DiskTier, "lend", slow)
    async with running_pair(model, tiny, on_disk(tmp_path)) as pair:
        call = asyncio.ensure_future(pair.answer(prompt, LOCAL))
        await eventually(lambda: tiers_of(pair.decode).is_moving)
        call.cancel()
        await asyncio.wait([call])
        await eventually(lambda: not tiers_of(pair.decode).is_moving)
        await pair.decode.until_whole()
        assert pair.decode.engine.stats().num_prefilled_tokens == 0
        may_go_on.set()
        assert (await pair.answer(prompt, LOCAL)).tokens() == right.tokens()


async def test_more_memory_than_there_is_and_folders_that_are_none_are_refused_by_flag(model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for tiers, words in (
        (TierConfig(kv_host_gb=1e9), "--kv-host-gb"),
        (TierConfig(kv_disk=str(tmp_path / "kv"), kv_disk_gb=1e-9), "--kv-disk-gb"),
        (TierConfig(kv_disk=str(tmp_path / "file" / "kv")), "--kv-disk"),
    ):
        with pytest.raises(ConfigError, match=words):
            async with running_worker(model, tiers=tiers):
                raise AssertionError("it has started")
