"""vLLM's KV on a device: a tensor for each layer, of which blocks leave and arrive through pinned pieces of host memory.

A piece is a part in wire order: for each layer its blocks, each as it lies in vLLM's memory, keys and values together
(kvtransfer/manifest.py). It serves any device of torch's; on the CPU transports read the pool itself (kv_pool.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from kvtransfer.manifest import PoolShape
from kvtransfer.staging import StagedMemory
from pdmesh.engine.kv_cache.copies import DevicePieces, Piece, PieceSize
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import Mark, Streams

DEPARTURES = StagingSizes(num_pieces=8)
ARRIVALS = StagingSizes(num_pieces=4)


def raw_blocks(caches: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the bytes of each layer's blocks, [num_blocks, block_bytes] uint8, views of vLLM's tensors.

    vLLM's shape is [blocks, heads, tokens, 2 * head_dim] whatever the order in memory. Raises ValueError for layers that are not
    alike, or whose blocks are not dense.
    """
    first = next(iter(caches.values()))
    found = []
    for name, cache in caches.items():
        size = cache[0].numel()
        reach = 1 + sum((length - 1) * stride for length, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
        if cache.shape != first.shape or cache.dtype != first.dtype or reach != size:
            raise ValueError(
                f"model: vLLM keeps the KV of {name} as {tuple(cache.shape)} {cache.dtype} with strides {cache.stride()}, the "
                f"first layer's as {tuple(first.shape)} {first.dtype}; such KV cannot be handed off yet"
            )
        found.append(torch.as_strided(cache, (cache.shape[0], size), (cache.stride(0), 1)).view(torch.uint8))
    return found


class LayerCopies(DevicePieces):
    """Copy pieces of one direction. Satisfies `pdmesh.engine.kv_cache.copies.Copies`."""

    def __init__(self, blocks: Sequence[Tensor], streams: Streams, piece_bytes: int) -> None:
        """`blocks`: see `raw_blocks`. Raises ValueError for a piece too small for one block of a layer."""
        self.block_bytes = blocks[0].shape[1] // 2
        super().__init__(streams, PieceSize.of(piece_bytes, self.block_bytes), blocks[0].device)
        self._blocks = blocks
        self._room = torch.empty(piece_bytes, dtype=torch.uint8, device=blocks[0].device)

    def fetch(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        room, host = self._rows(piece, layers, num_blocks)

        def work() -> None:
            ids = self._ids(piece, num_blocks)
            for rows, layer in zip(room, layers, strict=True):
                torch.index_select(self._blocks[layer], 0, ids, out=rows)
            host.copy_(room, non_blocking=True)

        return self._lane.run(work, after)

    def store(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        room, host = self._rows(piece, layers, num_blocks)

        def work() -> None:
            ids = self._ids(piece, num_blocks).long()
            room.copy_(host, non_blocking=True)
            for rows, layer in zip(room, layers, strict=True):
                self._blocks[layer].index_copy_(0, ids, rows)

        return self._lane.run(work, after)

    def _rows(self, piece: Piece, layers: range, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return the room on the device and the piece, as [layers, blocks, bytes]."""
        shape = (len(layers), num_blocks, 2 * self.block_bytes)
        num_bytes = shape[0] * shape[1] * shape[2]
        return self._room[:num_bytes].view(shape), piece.host[:num_bytes].view(shape)


def stage(
    blocks: Sequence[Tensor], streams: Streams, departures: StagingSizes = DEPARTURES, arrivals: StagingSizes = ARRIVALS
) -> StagedMemory:
    """Return vLLM's pool as transports see it. Raises ValueError for pieces too small for a block of a layer."""
    num_blocks, block_bytes = blocks[0].shape
    out, back = (
        Staging(num_blocks, streams, sizes, copies=LayerCopies(blocks, streams, sizes.piece_bytes))
        for sizes in (departures, arrivals)
    )
    for direction in (out, back):
        direction.warm()
    shape = PoolShape(len(blocks), num_blocks, block_bytes // 2, num_planes=1)
    return StagedMemory(shape, out, back, Marks(streams))


def zero(blocks: Sequence[Tensor], block_ids: Sequence[int]) -> None:
    """Write zeros into blocks, in all layers; launched, not waited for."""
    if block_ids:
        ids = torch.tensor(block_ids, device=blocks[0].device)
        for layer in blocks:
            layer.index_fill_(0, ids, 0)
