"""The tier in host memory: one arena of places for blocks, mapped when it is first written to."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable

import numpy as np

from kvtransfer.framing import copy_runs
from kvtransfer.tiers.base import BlockBytes, IndexedTier
from pdmesh.engine.kv_cache.published_blocks import BlockName


class HostTier(IndexedTier):
    """Hold blocks in this process' memory. Satisfies `Tier`."""

    name = "host"

    def __init__(self, max_bytes: int, block_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Map the arena. Raises ValueError where not one block fits, OSError without so much address space."""
        num_places = max_bytes // block_bytes
        if num_places < 1:
            raise ValueError(f"kv_host_gb: {max_bytes} bytes are less than a block of {block_bytes}")
        super().__init__(num_places * block_bytes, clock)
        self._block_bytes = block_bytes
        self._whole = np.array([[0, 0, block_bytes]], np.int64)
        # Ordinary pages: huge ones cost ten times as much when they are first touched, and blocks are read in long runs.
        self._arena = mmap.mmap(-1, num_places * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._free = list(range(num_places - 1, -1, -1))
        self._places: dict[BlockName, int] = {}
        self._crcs: dict[BlockName, int] = {}
        self._forgotten: set[BlockName] = set()  # damaged, and still lent

    def write(self, name: BlockName, block: BlockBytes, keep_s: float) -> None:
        place = self._take_place(name)
        if place is None:
            return
        with memoryview(self._arena)[place * self._block_bytes : (place + 1) * self._block_bytes] as target:
            crc = copy_runs(0, target, block.content, self._whole, is_cold=True)
        with self._lock:
            if crc != block.crc:  # it was damaged before it came here
                self.counts.num_corrupt += 1
                self._free.append(place)
                return
            self._places[name], self._crcs[name] = place, crc
            self._index.add(name, self._block_bytes, self._clock() + keep_s)
            self._changes.append(name)
            self.counts.num_written += 1

    def _take_place(self, name: BlockName) -> int | None:
        with self._lock:
            if name in self._index:
                return None
            if not self._free:
                for victim in self._index.victims(self._block_bytes, name, self._clock()):
                    self._drop(victim)
            return self._free.pop() if self._free else None

    def _drop(self, name: BlockName) -> None:
        self._free.append(self._places.pop(name))
        del self._crcs[name]
        self._changes.append(name)

    def lend(self, name: BlockName) -> BlockBytes | None:
        with self._lock:
            if not self._index.hold(name):
                return None
            start = self._places[name] * self._block_bytes
            self.counts.num_read += 1
            return BlockBytes(memoryview(self._arena)[start : start + self._block_bytes], self._crcs[name])

    def give_back(self, name: BlockName, *, is_damaged: bool) -> None:
        with self._lock:
            self._index.let_go(name)
            if is_damaged:
                self.counts.num_corrupt += 1
                self._forgotten.add(name)
            if name in self._forgotten and not self._index.is_held(name):
                self._forgotten.discard(name)
                self._index.remove(name)
                self._drop(name)

    def close(self) -> None:
        """Free the memory; views that are lent keep it."""
        with contextlib.suppress(BufferError):
            self._arena.close()
