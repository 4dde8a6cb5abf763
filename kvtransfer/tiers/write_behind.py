"""What the pool publishes is written to the tiers behind; what it withdraws is taken out of them; both are told to the index.

    published ─► pinned ─► copied out of the pool ─► unpinned ─► rounded, if they are ─► each tier's own writing thread
    withdrawn ─► refused at once, and forgotten by the tiers

A tier that stands still is waited for a moment only, and passed over until it has taken what it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from kvtransfer.rounding import Rounding
from kvtransfer.tiers.base import BlockBytes, Tier
from kvtransfer.tiers.pool_blocks import PoolBlocks
from kvtransfer.tiers.reuse import ReuseWatch
from kvtransfer.tiers.threads import TierThreads
from pdmesh.engine.interface import KVSharing
from pdmesh.engine.kv_cache.published_blocks import BlockName

PERIOD_S = 0.05
"""Between two looks whether there is something to write, or to tell."""
BATCH_BYTES = 4 << 20
"""What is written at once: so much is pinned, and copied."""
REFRESH_S = 30.0
"""Between two looks what others have done to a tier that they share."""
WAIT_S = 2.0
"""How long the tiers are waited for with a batch."""
FLUSH_S, FLUSH_PERIOD_S = 5.0, 0.01
TOLD_AT_ONCE = 1000
MAX_REFUSED = 1 << 16


class WriteBehind:
    """Write, forget and tell. Everything is called on the event loop."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        sharing: KVSharing,
        blocks: PoolBlocks,
        reuse: ReuseWatch | None,
        rounding: Rounding | None = None,
    ) -> None:
        """Start a writing thread for each tier, which comes behind everything else. `reuse` chooses what is written; None: all
        is."""
        self._tiers = tuple(tiers)
        self._sharing = sharing
        self._blocks, self._rounding = blocks, rounding
        self._reuse = reuse
        self._batch_blocks = max(1, BATCH_BYTES // blocks.block_bytes)
        self._threads = {tier.name: TierThreads(1, name=f"kv-{tier.name}-write", is_behind=True) for tier in tiers}
        self._copying = TierThreads(1, name="kv-tier-copy-out", is_behind=True)
        self._writes: dict[str, Future[None]] = {}  # the last one of each tier
        self._refresh_at = 0.0
        self._serial = itertools.count(1)
        self._refused: OrderedDict[BlockName, None] = OrderedDict()
        self.told: dict[BlockName, None] = {}
        self.is_moving = False  # it holds blocks of the pool
        self._is_writing = False

    def refuses(self, name: BlockName) -> bool:
        """Return whether a block was withdrawn and not published again: what tiers have of it is of no use."""
        return name in self._refused

    async def run(self) -> None:
        """Work until cancelled. Raises EngineStopped."""
        while True:
            await self._forget_withdrawn()
            await self.write_some()
            await self._write_again()
            self._refresh()
            await self.tell()
            await asyncio.sleep(0 if self._sharing.has_published else PERIOD_S)

    async def flush(self, limit_s: float = FLUSH_S) -> None:
        """Wait until `run` has written what was published, for at most so long, so that the worker's successor finds it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._sharing.has_published or self._is_writing or (self._reuse is not None and self._reuse.has_again):  # noqa: ASYNC110  another thread publishes
                    await asyncio.sleep(FLUSH_PERIOD_S)

    async def write_some(self) -> None:
        """Write the blocks that were published first, as many as a batch has."""
        published = dict(await self._sharing.take_published(self._batch_blocks))
        if not published:
            return
        for name in published:
            self._refused.pop(name, None)
        wanted = published if self._reuse is None else self._reuse.chosen(published)
        await self._write_behind(wanted)

    async def _write_again(self) -> None:
        """Write blocks that were not worth it when they were published, and have been used since."""
        used = await self._sharing.take_used()
        if self._reuse is not None:
            for each in used:
                self._reuse.used(each)
                await asyncio.sleep(0)
            await self._write_behind(self._reuse.take_again(self._batch_blocks))

    async def _write_behind(self, wanted: Mapping[BlockName, float]) -> None:
        if not wanted:
            return
        self._is_writing = True
        try:
            await self._write(wanted)
        finally:
            self._is_writing = False

    async def _write(self, wanted: Mapping[BlockName, float]) -> None:
        """Write blocks, each with the seconds for which a session wants it, to the tiers that lack them."""
        lacking: dict[BlockName, list[Tier]] = {}
        await self._look(list(wanted))
        for tier in self._ready():
            for name in tier.lacks(wanted):
                lacking.setdefault(name, []).append(tier)
            for keep_s in {each for each in wanted.values() if each}:
                tier.touch([name for name, each in wanted.items() if each == keep_s], keep_s)
        blocks = await self._copied(list(lacking)) if lacking else {}
        for tier in self._tiers:
            batch = [(name, block, wanted[name]) for name, block in blocks.items() if tier in lacking[name]]
            if batch:
                self._writes[tier.name] = self._threads[tier.name].submit(partial(tier.write_batch, batch))
        await self._settled()

    async def _look(self, names: Sequence[BlockName]) -> None:
        """Have tiers look which of these blocks others have written to them already."""
        for tier in self._ready():
            if tier.may_be_shared:
                self._writes[tier.name] = self._threads[tier.name].submit(partial(tier.look, names))
        await self._settled()

    def _ready(self) -> list[Tier]:
        """Return the tiers that have taken what they were given."""
        return [tier for tier in self._tiers if (write := self._writes.get(tier.name)) is None or write.done()]

    async def _settled(self) -> None:
        """Wait for the writes a moment; raise the error of one that failed otherwise than by the system's refusal."""
        waiting = [asyncio.wrap_future(write) for write in self._writes.values() if not write.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=WAIT_S)
        for name in [name for name, write in self._writes.items() if write.done()]:
            self._writes.pop(name).result()

    async def _copied(self, names: Sequence[BlockName]) -> dict[BlockName, BlockBytes]:
        """Return those of the blocks that are still in the pool, as the tiers hold them."""
        pin_id = f"tier:{next(self._serial)}"
        self.is_moving = True
        try:
            found = await self._sharing.pin_any(pin_id, [name.block_hash for name in names])
            pinned = {name: block_id for name, block_id in zip(names, found, strict=True) if block_id is not None}
            blocks = await self._blocks.read(list(pinned.values()), self._copying) if pinned else []
        finally:
            self.is_moving = False
            await self._sharing.unpin(pin_id)
        return dict(zip(pinned, await self._rounded(blocks), strict=True))

    async def _rounded(self, blocks: list[BlockBytes]) -> list[BlockBytes]:
        if self._rounding is None or not blocks:
            return blocks
        rounded = self._rounding.rounded
        return await self._copying.run(lambda: [rounded(block) for block in blocks])

    async def _forget_withdrawn(self) -> None:
        """Refuse blocks whose content turned out to be useless, and have the tiers forget them, behind what they are writing."""
        withdrawn = await self._sharing.take_withdrawn()
        if not withdrawn:
            return
        self._refused.update(dict.fromkeys(withdrawn))
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        for tier in self._tiers:
            self._threads[tier.name].submit(partial(tier.forget, withdrawn))

    def _refresh(self) -> None:
        """Have tiers look what others have done to them, from time to time."""
        now = asyncio.get_running_loop().time()
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH_S
            for tier in self._ready():
                self._writes[tier.name] = self._threads[tier.name].submit(tier.refresh)

    async def tell(self) -> None:
        """Tell the prefix cache's log what has come and gone, in slices: at the start that may be all that a folder holds."""
        changed = list(dict.fromkeys(name for tier in self._tiers for name in tier.take_changes()))
        for start in range(0, len(changed), TOLD_AT_ONCE):
            await self._tell(changed[start : start + TOLD_AT_ONCE])
            await asyncio.sleep(0)

    async def _tell(self, changed: Sequence[BlockName]) -> None:
        are_here = [any(each) for each in zip(*(tier.holds(changed) for tier in self._tiers), strict=True)]
        stored = [name for name, is_here in zip(changed, are_here, strict=True) if is_here and name not in self.told]
        evicted = [name for name, is_here in zip(changed, are_here, strict=True) if not is_here and name in self.told]
        self.told.update(dict.fromkeys(stored))
        for name in evicted:
            del self.told[name]
        await self._sharing.note_tiers([each.block_hash for each in stored], [each.block_hash for each in evicted])

    def close(self) -> None:
        """Let the threads end; one that a disk holds is left behind."""
        for threads in (self._copying, *self._threads.values()):
            threads.close()
