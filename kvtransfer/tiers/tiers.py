"""The tiers beneath a worker's block pool: what the pool publishes is written to them behind, and comes back when it is wanted.

    published blocks ─► pinned ─► copied out of the pool ─► unpinned ─► host, disk, store     in the background, niced
    a prompt ─► which of its blocks the pool lacks and a tier has ─► reserved ─► read, checked ─► published in the pool
                a store is asked for those that no tier is known to have

A restore is to the engine what KV from another worker is: blocks are reserved, filled and published, so a request finds them as
its cached prefix. It begins when the request arrives, and runs beside the steps of others. Nothing that goes wrong is an error of
the request: what has not come is computed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtransfer.rounding import Rounding
from kvtransfer.stream import to_its_end
from kvtransfer.tiers.base import BlockBytes, Tier
from kvtransfer.tiers.pool_blocks import PoolBlocks
from kvtransfer.tiers.rate import ASK_S, FIXED_S, FORCED_LIMIT_S, PATIENCE, ReadRate, is_worth, limit_s
from kvtransfer.tiers.reuse import ReuseWatch
from kvtransfer.tiers.threads import TierThreads
from kvtransfer.tiers.write_behind import WriteBehind
from pdmesh.engine.errors import DuplicateRequest, EngineStopped, InvalidRequest, RequestTooLarge, UnknownAdapter
from pdmesh.engine.interface import KVSharing
from pdmesh.engine.kv_cache.published_blocks import BlockName, names_of
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime import failpoints
from pdmesh.sampling_params import SamplingParams

BATCH_BYTES = 16 << 20
"""What is read at once. Smaller batches spend their time on the way between threads."""
READ_AHEAD = 4
"""Batches that are read at once, as many as there are threads for it."""
ASSUMED_BYTES_PER_S = {"host": 4e9, "disk": 5e8, "store": 2e8}
WIDENED_BYTES_PER_S = 2e8
"""What a reading thread is assumed to widen of rounded blocks, beside reading them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierTools:
    """Hold what tiers need of the worker. `compute_s(first, last)` predicts the computation of a prompt's tokens; None: the
    worker cannot tell yet."""

    sharing: KVSharing
    release: Callable[[str], Coroutine[object, object, bool]]
    blocks: PoolBlocks
    copying: TierThreads
    block_size: int
    compute_s: Callable[[int, int], float | None]
    restores: str = "auto"  # auto: where it is quicker than computing; always; off
    writes: str = "auto"  # auto: what is worth it (reuse.py); always
    rounding: Rounding | None = None  # None: tiers hold what the pool does


@dataclass
class RestoreCounts:
    """Count restores since the start."""

    num_restores: int = 0
    num_tokens: int = 0
    num_rounded_tokens: int = 0  # of these tokens: their KV is rounded
    num_late: int = 0  # that were given up, since the tier was too slow


@dataclass(frozen=True)
class Restored:
    """Hold what a restore has brought, in tokens. `was_late`: a tier was too slow, and was waited for in vain."""

    num_tokens: int = 0
    was_late: bool = False


NOTHING = Restored()


@dataclass
class _Batch:
    """Blocks of one tier, one after the other in a prompt."""

    tier: Tier
    names: list[BlockName] = field(default_factory=list)


class KVTiers:
    """Restore blocks, and have them written behind. Everything is called on the event loop."""

    def __init__(self, tools: TierTools) -> None:
        self.tiers: tuple[Tier, ...] = ()
        self.counts = RestoreCounts()
        self._tools = tools
        self._batch_blocks = max(1, BATCH_BYTES // tools.blocks.block_bytes)
        self._rates: dict[str, ReadRate] = {}
        self._reading: dict[str, TierThreads] = {}
        self._behind: WriteBehind | None = None
        self._reuse = ReuseWatch() if tools.writes == "auto" else None
        self._under_way: dict[tuple[bytes, ...], asyncio.Event] = {}
        self._serial = itertools.count(1)
        self._num_moving = 0
        self.is_off = False  # a bug of a tier was met: it is not used any more

    def use(self, tiers: Sequence[Tier]) -> None:
        """Use these tiers, the fastest first. Call it once: before, there is nothing to restore."""
        self.tiers = tuple(tiers)
        self._rates = {tier.name: ReadRate(self._assumed_bytes_per_s(tier.name)) for tier in tiers}
        self._reading = {tier.name: TierThreads(READ_AHEAD, name=f"kv-{tier.name}-read", is_behind=False) for tier in tiers}
        self._behind = WriteBehind(tiers, self._tools.sharing, self._tools.blocks, self._reuse, self._tools.rounding)

    def _assumed_bytes_per_s(self, tier: str) -> float:
        reading = ASSUMED_BYTES_PER_S[tier]
        return reading if self._tools.rounding is None else 1 / (1 / reading + 1 / WIDENED_BYTES_PER_S)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block in all layers, as the tiers hold it."""
        rounding = self._tools.rounding
        return self._tools.blocks.block_bytes if rounding is None else rounding.num_bytes

    @property
    def token_s(self) -> float:
        """Return how long a token's KV should take to come, in seconds, from the slowest tier, by what was measured lately; one
        of another host counts while it is known to have something. 0: nothing comes from tiers (any more)."""
        if self.is_off or self._tools.restores == "off":
            return 0.0
        now = time.monotonic()
        counted = [tier for tier in self.tiers if not tier.is_remote or tier.num_blocks] or self.tiers
        slowest = min((self._rates[tier.name].bytes_per_s(now) for tier in counted), default=0.0)
        return self.block_bytes / self._tools.block_size / slowest if slowest else 0.0

    @property
    def told(self) -> tuple[BlockName, ...]:
        """Return the blocks that the prefix cache's log was told of and that are there still."""
        return () if self._behind is None else tuple(self._behind.told)

    @property
    def held(self) -> tuple[bytes, ...]:
        """Return the hashes of the same."""
        return tuple(name.block_hash for name in self.told)

    @property
    def is_moving(self) -> bool:
        """Return whether it holds blocks of the pool now, which it gives back soon."""
        return bool(self._num_moving) or (self._behind is not None and self._behind.is_moving)

    async def run(self) -> None:
        """Write behind until cancelled. Raises EngineStopped. Any other error is a bug of a tier, which costs the tiers and no
        request."""
        if self._behind is None:
            return
        try:
            await self._behind.run()
        except EngineStopped:
            raise
        except Exception:  # noqa: BLE001  whatever a tier has met must cost no request
            self._switch_off()

    async def flush(self) -> None:
        """Wait until what was published is written, for a few seconds at most."""
        if self._behind is not None and not self.is_off:
            await self._behind.flush()

    def _switch_off(self) -> None:
        """Restore and write nothing any more, after an error that nobody foresaw."""
        self.is_off = True
        logger.exception("the KV tiers failed, and are not used any more until the worker is started anew")

    # Restore.

    async def restore(self, request: EngineRequest) -> Restored:
        """Bring blocks of a request that the pool lacks and a tier has into the prefix cache, where that is worth it. Raises
        EngineStopped."""
        all_computed = request.sampling.prompt_logprobs is not None or request.pooling is not None
        if all_computed or self._tools.restores == "off" or self.is_off or not self.tiers:
            return NOTHING
        try:
            return await self._restore_known(request)
        except EngineStopped:
            raise
        except Exception:  # noqa: BLE001  whatever a tier has met must cost no request
            self._switch_off()
            return NOTHING

    async def _restore_known(self, request: EngineRequest) -> Restored:
        num_late = self.counts.num_late
        tokens = request.history
        num_here, hashes = await self._tools.sharing.lacking(request.block_root, tokens)
        names = names_of(request.block_root, hashes)
        if self._reuse is not None:
            self._reuse.used(hashes)
        await self._ask(names, num_here, len(tokens))
        batches = self._plan(names, num_here)
        num_blocks = num_here + sum(len(batch.names) for batch in batches)
        limit = self._limit(batches, num_here, num_blocks, len(tokens)) if batches else None
        if limit is None:
            return Restored(0, was_late=self.counts.num_late > num_late)
        key = hashes[:num_blocks]
        if key in self._under_way:  # another request has asked for the same: it will be here
            await self._under_way[key].wait()
            return NOTHING
        self._under_way[key] = done = asyncio.Event()
        try:
            num_tokens = await self._restore(request, tokens[: num_blocks * self._tools.block_size], batches, limit)
            return Restored(num_tokens, was_late=self.counts.num_late > num_late)
        finally:
            del self._under_way[key]
            done.set()

    async def _ask(self, names: Sequence[BlockName], num_here: int, num_tokens: int) -> None:
        """Ask tiers of other hosts for the blocks behind those that are known to be somewhere, where it would pay if they had
        all of them."""
        for tier in self.tiers:
            rate = self._rates[tier.name]
            if not tier.is_remote or not tier.is_available or time.monotonic() < rate.not_before:
                continue
            num_known = num_here + sum(len(batch.names) for batch in self._plan(names, num_here))
            unknown = names[num_known:]
            limit = self._limit([_Batch(tier, list(unknown))], num_known, len(names), num_tokens) if unknown else None
            if limit is not None:
                await self._found(tier, unknown, min(limit, PATIENCE * ASK_S))

    async def _found(self, tier: Tier, names: Sequence[BlockName], limit: float) -> None:
        future = self._reading[tier.name].submit(lambda: tier.find(names))
        try:
            async with asyncio.timeout(limit):
                await asyncio.wrap_future(future)  # cancelled in time, it is not asked at all
        except TimeoutError:
            self._rates[tier.name].leave_out(time.monotonic())
            self.counts.num_late += 1
            logger.warning("the %s tier did not say within %.2f s what it has", tier.name, limit)

    def _plan(self, names: Sequence[BlockName], num_here: int) -> list[_Batch]:
        """Return the blocks behind those that the pool has, as far as tiers have them, by tier; all of them are touched."""
        now = time.monotonic()
        usable = [tier for tier in self.tiers if now >= self._rates[tier.name].not_before]
        missing = list(itertools.takewhile(lambda name: not self._refuses(name), names[num_here:]))
        batches: list[_Batch] = []
        for tier in self.tiers:
            tier.touch(reversed(names))
        held = [tier.holds(missing) for tier in usable]
        for index, name in enumerate(missing):
            found = next((each for each, holds in zip(usable, held, strict=True) if holds[index]), None)
            if found is None:
                break
            if not batches or batches[-1].tier is not found or len(batches[-1].names) >= self._batch_blocks:
                batches.append(_Batch(found))
            batches[-1].names.append(name)
        return batches

    def _limit(self, batches: Sequence[_Batch], num_here: int, num_blocks: int, num_tokens: int) -> float | None:
        """Return how long to wait; None: computing is quicker."""
        if self._tools.restores == "always":
            return FORCED_LIMIT_S
        size = self._tools.block_size
        whole_s, rest_s = (
            self._tools.compute_s(min(count * size, num_tokens - 1), num_tokens) for count in (num_here, num_blocks)
        )
        if whole_s is None or rest_s is None:
            return None
        now, block_bytes = time.monotonic(), self.block_bytes
        takes_s = FIXED_S + sum(len(each.names) * block_bytes / self._rates[each.tier.name].bytes_per_s(now) for each in batches)
        return limit_s(takes_s, whole_s - rest_s) if is_worth(takes_s, whole_s - rest_s) else None

    async def _restore(self, request: EngineRequest, tokens: tuple[int, ...], batches: list[_Batch], limit: float) -> int:
        request_id = f"t:{request.request_id}:{next(self._serial)}"
        wanted = EngineRequest(
            request_id, tokens, SamplingParams(max_tokens=1), cache_root=request.cache_root, adapter=request.adapter
        )
        self._num_moving += 1
        try:
            expected = await self._tools.sharing.expect(wanted)
            if expected is None:
                return 0
            size = self._tools.block_size
            num_cached = expected.reserved.num_cached_tokens // size
            missing = set(expected.hashes)
            for batch in batches:  # the pool may have got some of them meanwhile, and lost others
                batch.names = [name for name in batch.names if name.block_hash in missing]
            batches = [batch for batch in batches if batch.names]
            planned = [name.block_hash for batch in batches for name in batch.names]
            if planned != list(expected.hashes):
                return 0
            num_blocks = await self._fill(request_id, batches, expected.reserved.block_ids, num_cached, limit)
            self.counts.num_restores += 1
            num_tokens = (num_blocks - num_cached) * size
            self.counts.num_tokens += num_tokens
            self.counts.num_rounded_tokens += num_tokens if self._tools.rounding is not None else 0
            return num_tokens
        except (InvalidRequest, RequestTooLarge, DuplicateRequest, UnknownAdapter):
            return 0
        finally:
            self._num_moving -= 1
            await to_its_end(self._tools.release(request_id))

    async def _fill(self, request_id: str, batches: Sequence[_Batch], block_ids: Sequence[int], first: int, limit: float) -> int:
        """Read batches, the next ones while one is written into the pool; return the blocks that are whole, from the first on."""
        deadline = time.monotonic() + limit
        reads: list[_Read] = []
        try:
            for number, batch in enumerate(batches):
                while len(reads) < min(len(batches), number + READ_AHEAD):
                    reads.append(self._read(batches[len(reads)]))
                blocks = await self._arrived(reads[number], deadline)
                if not blocks:
                    break
                are_whole = await self._tools.blocks.write(block_ids[first : first + len(blocks)], blocks)
                reads[number].give_back(are_whole)
                await failpoints.hit_async("tier.restore")
                num_whole = next((index for index, is_whole in enumerate(are_whole) if not is_whole), len(blocks))
                first += num_whole
                await self._tools.sharing.take_in(
                    request_id, first * self._tools.block_size, is_rounded=self._tools.rounding is not None
                )
                if num_whole < len(batch.names):
                    break
        finally:
            for read in reads:
                read.abandon()
        return first

    def _read(self, batch: _Batch) -> _Read:
        return _Read(self._reading[batch.tier.name], batch, self._tools.rounding)

    def _refuses(self, name: BlockName) -> bool:
        return self._behind is not None and self._behind.refuses(name)

    async def _arrived(self, read: _Read, deadline: float) -> list[BlockBytes]:
        """Return the leading blocks of a batch that the tier has lent; none when it took too long."""
        rate, began = self._rates[read.batch.tier.name], read.began
        num_bytes = len(read.batch.names) * self.block_bytes
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                blocks = await asyncio.shield(asyncio.wrap_future(read.future))
        except TimeoutError:
            now = time.monotonic()
            rate.was_late(num_bytes, now - began, now)
            self.counts.num_late += 1
            logger.warning("the %s tier took more than %.2f s for %d bytes", read.batch.tier.name, now - began, num_bytes)
            return []
        rate.came(len(blocks) * self.block_bytes, read.seconds, time.monotonic())
        return blocks

    def close(self) -> None:
        """End the threads and the tiers; a thread that a disk holds is left behind."""
        if self._behind is not None:
            self._behind.close()
        for threads in (self._tools.copying, *self._reading.values()):
            threads.close()
        for tier in self.tiers:
            tier.close()


class _Read:
    """Read a batch from its tier in a thread; what was lent is given back, also where no request waits for it any more."""

    def __init__(self, threads: TierThreads, batch: _Batch, rounding: Rounding | None) -> None:
        self.batch = batch
        self._rounding = rounding
        self.began = time.monotonic()
        self.seconds = 0.0
        self._is_given_back = False
        self.future: Future[list[BlockBytes]] = threads.submit(self._lend)

    def _lend(self) -> list[BlockBytes]:
        began = time.monotonic()
        blocks = self._widened(self.batch.tier.lend_batch(self.batch.names))
        self.seconds = time.monotonic() - began
        return blocks

    def _widened(self, blocks: list[BlockBytes]) -> list[BlockBytes]:
        """Return blocks as the pool has them."""
        if self._rounding is None:
            return blocks
        try:
            return [self._rounding.restored(block) for block in blocks]
        except BaseException:
            for name, _ in zip(self.batch.names, blocks, strict=False):
                self.batch.tier.give_back(name, is_damaged=False)
            raise

    def give_back(self, are_whole: Sequence[bool]) -> None:
        """Give back what was lent; blocks that are not whole are forgotten."""
        self._is_given_back = True
        for name, is_whole in zip(self.batch.names, are_whole, strict=False):
            self.batch.tier.give_back(name, is_damaged=not is_whole)

    def abandon(self) -> None:
        """Give back what was lent and is not given back yet, once it has come; idempotent."""
        if not self._is_given_back and not self.future.cancel():
            self._is_given_back = True
            self.future.add_done_callback(self._give_back_later)

    def _give_back_later(self, future: Future[list[BlockBytes]]) -> None:
        if not future.cancelled() and future.exception() is None:
            for name in self.batch.names[: len(future.result())]:
                self.batch.tier.give_back(name, is_damaged=False)
