"""The publisher of KV events: it tells routers which prompt blocks this worker's prefix cache holds, as changes through the
registry, and as a full list on request.

Changes are taken at once, also while the engine is in a step, and sent at most every PERIOD_S. A change that Redis does not take
is retried, and meanwhile the engine's log collects further changes, each block once; when the log overflows, the sequence has a
gap and routers ask for the full list. Neither the engine nor a request waits for any of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from pdmesh.engine.errors import EngineStopped
from pdmesh.runtime.errors import Unavailable
from pdmesh.text.block_hash import short_name
from pdmesh.v1 import worker_pb2
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.base import PrefixCache

if TYPE_CHECKING:
    from pdmesh.runtime.registry.block_stream import BlockStream

PERIOD_S = 0.03
PART_NAMES = 1 << 15  # 256 KiB on the wire, and as much of tiers


class PrefixPublisher:
    """Publish the changes of one worker's prefix cache."""

    def __init__(self, cache: PrefixCache, epoch: int, worker_id: str) -> None:
        self._cache = cache
        self._epoch = epoch
        self._worker_id = worker_id
        self._unsent: worker_pb2.BlockChange | None = None

    async def run(self, stream: BlockStream) -> None:
        """Publish until cancelled."""
        try:
            while True:
                await self.publish(stream)
                await asyncio.sleep(PERIOD_S)
        finally:
            await stream.stop()

    async def publish(self, stream: BlockStream) -> None:
        """Send the unsent change of the last round, else the changes since then."""
        if self._unsent is None and self._cache.has_changes:
            changes = await self._cache.take_changes()
            if changes is not None:
                self._unsent = worker_pb2.BlockChange(
                    epoch=self._epoch,
                    sequence=changes.sequence,
                    stored=map(short_name, changes.stored),
                    evicted=map(short_name, changes.evicted),
                    tier_stored=map(short_name, changes.tier_stored),
                    tier_evicted=map(short_name, changes.tier_evicted),
                )
        if self._unsent is not None and await stream.append(self._worker_id, self._unsent):
            self._unsent = None


async def list_blocks(
    cache: PrefixCache, epoch: int, in_tiers: Callable[[], tuple[bytes, ...]] = tuple
) -> AsyncIterator[worker_pb2.BlockList]:
    """Yield all blocks of the prefix cache and of the tiers at one moment, in parts. Raises Unavailable when it has stopped."""
    try:
        sequence, hashes = await cache.blocks()
    except EngineStopped as error:
        raise Unavailable(f"this worker is stopping: {error}") from error
    tier_hashes = in_tiers()  # of the same moment: nothing was awaited since
    longest = max(len(hashes), len(tier_hashes), 1)
    for start in range(0, longest, PART_NAMES):
        yield worker_pb2.BlockList(
            epoch=epoch,
            sequence=sequence,
            blocks=map(short_name, hashes[start : start + PART_NAMES]),
            tier_blocks=map(short_name, tier_hashes[start : start + PART_NAMES]),
            is_last=start + PART_NAMES >= longest,
        )


def most_names(config: WorkerConfig) -> int:
    """Return how many changed blocks the prefix cache keeps for the registry; 0 without one."""
    if not config.redis:
        return 0
    from pdmesh.runtime.registry.block_stream import MAX_NAMES  # redis is imported only for a registry

    return MAX_NAMES
