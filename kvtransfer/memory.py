"""The KV memory that a transfer reads or writes. The engine's KVPool satisfies it structurally.

Where a block lies:

    byte offset = ((layer * 2 + kv) * num_blocks + block_id) * bytes_per_layer_block        kv: 0 keys, 1 values
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.native.library import Runs


class KVMemory(Protocol):
    """One pool of KV blocks in CPU memory: [num_layers, 2, num_blocks, bytes_per_layer_block] bytes, contiguous."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def bytes_per_layer_block(self) -> int:
        """Bytes of one block's keys (or values) in one layer."""

    @property
    def fd(self) -> int | None:
        """The memfd behind the pool, or None where it cannot be shared."""

    def memory(self) -> memoryview:
        """The whole pool, writable, as bytes."""

    def block_view(self, layer: int, kv: int, block_id: int) -> memoryview:
        """Writable bytes of one block's keys (kv=0) or values (kv=1)."""


@dataclass(frozen=True)
class PoolShape:
    """The shape of a pool; enough to find a block in a peer's mapped memory."""

    num_layers: int
    num_blocks: int
    bytes_per_layer_block: int

    @property
    def num_bytes(self) -> int:
        return self.num_layers * 2 * self.num_blocks * self.bytes_per_layer_block

    def offset(self, layer: int, kv: int, block_id: int) -> int:
        return ((layer * 2 + kv) * self.num_blocks + block_id) * self.bytes_per_layer_block


def shape_of(memory: KVMemory) -> PoolShape:
    """The shape of `memory`."""
    return PoolShape(memory.num_layers, memory.num_blocks, memory.bytes_per_layer_block)


@dataclass(frozen=True)
class Run:
    """Blocks that lie side by side: `num_blocks` of them, from index `first` of a list of ids."""

    first: int
    num_blocks: int


def runs(*tables: Sequence[int]) -> Iterator[Run]:
    """Cut block tables of one length into the longest runs in which the ids of every table are consecutive."""
    ids = np.array(tables, np.int64)
    cuts = np.flatnonzero((np.diff(ids) != 1).any(axis=0)) + 1
    for start, end in pairwise([0, *cuts.tolist(), ids.shape[1]] if ids.size else []):
        yield Run(start, end - start)


@dataclass(frozen=True)
class Rectangle:
    """Blocks of a range of layers of a pool."""

    shape: PoolShape
    layers: range
    block_ids: Sequence[int]

    def offsets(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Of the keys of block_ids[i] for i in `indices`, then of their values, layer by layer."""
        planes = np.arange(2 * self.layers.start, 2 * self.layers.stop, dtype=np.int64)[:, None]
        blocks = np.array([self.block_ids[index] for index in indices], np.int64)
        return ((planes * self.shape.num_blocks + blocks) * self.shape.bytes_per_layer_block).reshape(-1)


def copies(target: Rectangle, source: Rectangle) -> Runs:
    """What to copy from one pool to another, in the order of the wire: [n, 3] of offset in target, offset in source, bytes."""
    pieces = list(runs(target.block_ids, source.block_ids))
    firsts = [run.first for run in pieces]
    sizes = np.array([run.num_blocks for run in pieces], np.int64) * target.shape.bytes_per_layer_block
    return np.stack([target.offsets(firsts), source.offsets(firsts), np.tile(sizes, 2 * len(target.layers))], axis=1)


def part_views(memory: KVMemory, layers: range, block_ids: Sequence[int]) -> list[memoryview]:
    """The bytes of a part in the order of the wire (per layer: keys of all blocks, then values), neighbours joined."""
    whole, shape = memory.memory(), shape_of(memory)
    size = shape.bytes_per_layer_block
    pieces = list(runs(block_ids))
    return [
        whole[start : start + run.num_blocks * size]
        for layer in layers
        for kv in (0, 1)
        for run in pieces
        for start in (shape.offset(layer, kv, block_ids[run.first]),)
    ]
