"""Blocks of the pool as a tier has them: the bytes of a block in all layers, behind each other, with their CRC-32C.

    block   layer 0: keys, values; layer 1: keys, values; ...           where they are joined: layer 0: both; ...

In CPU memory they are copied by a thread; in a pool that cannot be viewed (a device, ranks), through pinned pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtransfer.framing import checksum, copy_runs, room_for
from kvtransfer.manifest import KVMemory, PoolMemory
from kvtransfer.native.library import Runs, address_of, native
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import all_settled
from kvtransfer.tiers.base import BlockBytes
from kvtransfer.tiers.threads import TierThreads

_Copy: TypeAlias = "Callable[[Sequence[int], Sequence[memoryview]], list[int]]"


class PoolBlocks(Protocol):
    """Read and write blocks of a pool. A call that is cancelled returns only when nothing reads or writes any more."""

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block in all layers."""

    async def read(self, block_ids: Sequence[int], threads: TierThreads | None = None) -> list[BlockBytes]:
        """Return what these blocks hold, copied, by these threads where some are given."""

    async def write(self, block_ids: Sequence[int], blocks: Sequence[BlockBytes]) -> list[bool]:
        """Write blocks; return which of them are as their CRC says. The others' blocks hold anything."""


def pool_blocks(memory: KVMemory, threads: TierThreads) -> PoolBlocks:
    """Return the access to a pool, by what it is."""
    return StagedBlocks(memory, threads) if isinstance(memory, StagedMemory) else ViewedBlocks(memory, threads)


class ViewedBlocks:
    """Copy blocks of a pool in CPU memory."""

    def __init__(self, memory: PoolMemory, threads: TierThreads) -> None:
        self._memory, self._threads = memory, threads
        planes, size = memory.num_layers * memory.num_planes, 2 * memory.bytes_per_layer_block // memory.num_planes
        self.block_bytes = planes * size
        index = np.arange(planes, dtype=np.int64)
        # For block 0: offsets in the pool, offsets in the block, bytes. Another block's pieces lie `size` further in the pool.
        self._runs: Runs = np.stack([index * memory.num_blocks * size, index * size, np.full(planes, size)], axis=1)
        self._piece_bytes = size

    async def read(self, block_ids: Sequence[int], threads: TierThreads | None = None) -> list[BlockBytes]:
        contents = [room_for(self.block_bytes) for _ in block_ids]
        crcs = await self._copied(block_ids, contents, self._read, threads or self._threads)
        return [BlockBytes(content, crc) for content, crc in zip(contents, crcs, strict=True)]

    async def write(self, block_ids: Sequence[int], blocks: Sequence[BlockBytes]) -> list[bool]:
        crcs = await self._copied(block_ids, [block.content for block in blocks], self._write, self._threads)
        return [crc == block.crc for crc, block in zip(crcs, blocks, strict=True)]

    async def _copied(
        self, block_ids: Sequence[int], contents: Sequence[memoryview], copy: _Copy, threads: TierThreads
    ) -> list[int]:
        """Return the CRCs of copies that all threads make, each of neighbours."""
        share = -(-len(block_ids) // threads.num_threads)
        parts = [slice(start, start + share) for start in range(0, len(block_ids), max(1, share))]
        copies = [threads.submit(partial(copy, block_ids[part], contents[part])) for part in parts]
        await all_settled(copies)
        return [crc for each in copies for crc in each.result()]

    def _read(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> list[int]:
        with self._memory.memory() as pool:
            runs = self._runs_of(block_ids)[:, :, [1, 0, 2]]
            return [copy_runs(0, content, pool, each, is_cold=True) for content, each in zip(contents, runs, strict=True)]

    def _write(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> list[int]:
        library = native()
        with self._memory.memory() as pool:
            runs = self._runs_of(block_ids)
            if library is None:
                return [copy_runs(0, pool, content, each) for content, each in zip(contents, runs, strict=True)]
            runs[:, :, 0] += address_of(pool)
            runs[:, :, 1] += np.array([address_of(content) for content in contents], np.int64)[:, np.newaxis]
            return [library.copy(0, each, streams=True) for each in runs]

    def _runs_of(self, block_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the runs of each block, [blocks, planes, 3]."""
        runs = np.repeat(self._runs[np.newaxis], len(block_ids), axis=0)
        runs[:, :, 0] += np.array(block_ids, np.int64)[:, np.newaxis] * self._piece_bytes
        return runs


class StagedBlocks:
    """Copy blocks of a pool that cannot be viewed."""

    def __init__(self, memory: StagedMemory, threads: TierThreads) -> None:
        self._memory, self._threads = memory, threads
        planes, size = memory.num_planes, 2 * memory.bytes_per_layer_block // memory.num_planes
        self._shape = (memory.num_layers, planes, size)
        self.block_bytes = memory.num_layers * planes * size

    async def read(self, block_ids: Sequence[int], threads: TierThreads | None = None) -> list[BlockBytes]:
        threads = threads or self._threads
        contents = np.empty((len(block_ids), *self._shape), np.uint8)
        mark = self._memory.marks.now()
        for layers, blocks in self._cells(len(block_ids)):
            filled = await self._memory.fetch(layers, [block_ids[index] for index in blocks], mark)
            try:
                await threads.run(_into(contents[blocks.start : blocks.stop, layers.start : layers.stop], filled.view))
            finally:
                self._memory.give_back(filled)
        return await threads.run(lambda: [_summed(content) for content in contents])

    async def write(self, block_ids: Sequence[int], blocks: Sequence[BlockBytes]) -> list[bool]:
        are_whole = await self._threads.run(lambda: [checksum([each.content]) == each.crc for each in blocks])
        whole = [index for index, is_whole in enumerate(are_whole) if is_whole]
        if whole:
            content = await self._threads.run(lambda: self._in_wire_order([blocks[index] for index in whole]))
            ids = [block_ids[index] for index in whole]
            await self._memory.store(content, range(self._shape[0]), ids, self._memory.marks.now(), self._threads)
        return are_whole

    def _in_wire_order(self, blocks: Sequence[BlockBytes]) -> NDArray[np.uint8]:
        """Return [layers, planes, blocks, bytes]."""
        arrays = [np.frombuffer(each.content, np.uint8).reshape(self._shape) for each in blocks]
        return np.stack(arrays, axis=2)

    def _cells(self, num_blocks: int) -> list[tuple[range, range]]:
        """Return layers × blocks, each no more than a piece holds."""
        layers, planes, size = self._shape
        most = max(1, self._memory.part_bytes // (planes * size))
        num_layers = min(layers, most)
        num_each = max(1, most // num_layers)
        return [
            (range(first, min(layers, first + num_layers)), range(start, min(num_blocks, start + num_each)))
            for start in range(0, num_blocks, num_each)
            for first in range(0, layers, num_layers)
        ]


def _into(target: NDArray[np.uint8], view: memoryview) -> Callable[[], None]:
    """Return the copy of a piece [layers, planes, blocks, bytes] into [blocks, layers, planes, bytes]."""
    blocks, layers, planes, size = target.shape

    def copy() -> None:
        piece = np.frombuffer(view, np.uint8).reshape(layers, planes, blocks, size)
        np.copyto(target, piece.transpose(2, 0, 1, 3))

    return copy


def _summed(content: NDArray[np.uint8]) -> BlockBytes:
    view = memoryview(content.reshape(-1)).cast("B")  # type: ignore[arg-type]  # numpy's stubs know no buffers
    return BlockBytes(view, checksum([view]))
