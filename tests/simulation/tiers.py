"""The disks beneath workers' pools, in a simulated world: they keep blocks over the deaths of processes, and some of them badly.

The product's `KVTiers` work on it; what their threads do is done at once, some time later, in the worker's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvtransfer.stream import settled
from kvtransfer.tiers.base import BlockBytes, IndexedTier
from kvtransfer.tiers.settings import TierConfig
from kvtransfer.tiers.tiers import KVTiers
from pdmesh.engine.kv_cache.published_blocks import BlockName
from tests.simulation.world import MICROSECOND, Process, current_process

T = TypeVar("T")
CONFIG = TierConfig(kv_disk="simulated", kv_restore="always")
MAX_BLOCKS = 40
_DAMAGED = 0.3
"""Share of blocks in which a bit turns over on the disk."""

Stored = dict[BlockName, BlockBytes]


class SimulatedThreads:
    """What `TierThreads` do, in virtual time."""

    def __init__(self, num_threads: int, *, name: str, is_behind: bool) -> None:
        self._process, self.num_threads = _process(), num_threads

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn())
                except Exception as error:  # noqa: BLE001  the caller gets it
                    future.set_exception(error)

        self._process.later(self._process.world.rng.choice((20, 500, 3_000, 60_000)) * MICROSECOND, call)
        return future

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        future = self.submit(lambda: fn(*args))
        await settled(future)
        return future.result()

    def check_interrupted(self) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedDisk(IndexedTier):
    """Satisfies `Tier`. `stored` outlives the process."""

    name = "disk"

    def __init__(self, stored: Stored, block_bytes: int) -> None:
        super().__init__(MAX_BLOCKS * block_bytes, time.monotonic)
        self._stored, self._block_bytes, self._rng = stored, block_bytes, _process().world.rng
        for name in stored:
            self._index.add(name, block_bytes, self._clock())
            self._changes.append(name)

    def write(self, name: BlockName, block: BlockBytes, keep_s: float) -> None:
        for victim in self._index.victims(self._block_bytes, name, self._clock()):
            del self._stored[victim]
            self._changes.append(victim)
        if self._index.num_bytes + self._block_bytes > self._index.max_bytes:
            return
        content = bytearray(block.content)
        if self._rng.random() < _DAMAGED:
            content[self._rng.randrange(len(content))] ^= 1 << self._rng.randrange(8)
        self._stored[name] = BlockBytes(memoryview(content), block.crc)
        self._index.add(name, self._block_bytes, self._clock() + keep_s)
        self._changes.append(name)
        self.counts.num_written += 1

    def lend(self, name: BlockName) -> BlockBytes | None:
        if not self._index.hold(name):
            return None
        self.counts.num_read += 1
        return self._stored[name]

    def give_back(self, name: BlockName, *, is_damaged: bool) -> None:
        self._index.let_go(name)
        if is_damaged:
            self.counts.num_corrupt += 1
            if self._index.remove(name):
                del self._stored[name]
                self._changes.append(name)

    @property
    def num_held(self) -> int:
        """Return how many blocks have readers."""
        return sum(self._index.is_held(name) for name in self._index)

    def close(self) -> None:
        pass


def problems(found: KVTiers | None) -> list[str]:
    """Return what is wrong with tiers when nothing is left to do, in words. Raises IntegrityError."""
    told = []
    for tier in found.tiers if found is not None else ():
        assert isinstance(tier, SimulatedDisk)
        tier.check()
        if tier.num_held:
            told.append(f"{tier.num_held} blocks of the disk are held")
    if found is not None and found.is_off:
        told.append("its tiers have failed")
    if found is not None and found.is_moving:
        told.append("its tiers hold blocks of the pool")
    return told


def install(stored_of: Callable[[str], Stored]) -> None:
    """Have workers open their tiers here. `stored_of`: what the disk of a worker of that name holds, in the present run."""
    from kvtransfer.tiers import tiers, write_behind
    from pdmesh.worker import kv_sources

    def open_tiers(config: TierConfig, identity: Any, layout: Any, block_bytes: int, mesh: str) -> tuple[SimulatedDisk]:
        return (SimulatedDisk(stored_of(_process().name), block_bytes),)

    threads = "TierThreads"
    for owner, name, new in (
        *((owner, threads, SimulatedThreads) for owner in (tiers, write_behind, kv_sources)),
        (kv_sources, "open_tiers", open_tiers),
    ):
        setattr(owner, name, new)


def _process() -> Process:
    process = current_process()
    assert process is not None
    return process
