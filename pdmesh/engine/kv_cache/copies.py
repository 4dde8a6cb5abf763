"""Tokens of KV blocks into one contiguous piece, and back, by what computes on the pool's device.

    piece [len(layers), 2, tokens, heads, head_dim]: token t of it is token first_token + t of the blocks, in their order

A piece of whole blocks with all heads is a part as it travels (kvtransfer/parts.py): per layer all keys, then all values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.support import why_not_here


@dataclass(frozen=True)
class Move:
    """pool [num_layers, 2, num_blocks, block_size, num_heads, head_dim], contiguous; block_ids int32 on its device, within it;
    `heads`: a range of the pool's, those of the piece; None: all. `check` says what does not fit."""

    pool: Tensor
    layers: range
    block_ids: Tensor
    piece: Tensor
    first_token: int = 0
    heads: range | None = None

    def check(self) -> range:
        """The heads. Raises ValueError naming what does not fit."""
        pool, piece, layers, block_ids = self.pool, self.piece, self.layers, self.block_ids
        num_layers, _, _, block_size, num_heads, dim = pool.shape
        heads = range(num_heads) if self.heads is None else self.heads
        if not pool.is_contiguous() or not piece.is_contiguous():
            raise ValueError("pool, piece: they must be contiguous")
        if not 0 <= layers.start < layers.stop <= num_layers or layers.step != 1:
            raise ValueError(f"layers: {layers} is not within the pool's {num_layers}")
        if not 0 <= heads.start < heads.stop <= num_heads or heads.step != 1:
            raise ValueError(f"heads: {heads} is not within the pool's {num_heads}")
        if block_ids.dim() != 1 or block_ids.dtype != torch.int32 or not block_ids.is_contiguous():
            raise ValueError(f"block_ids: {block_ids.dtype} {tuple(block_ids.shape)}, expected int32 [blocks]")
        num_tokens = piece.shape[2] if piece.dim() == 5 else 0
        shape = (len(layers), 2, num_tokens, len(heads), dim)
        if piece.shape != shape or piece.dtype != pool.dtype:
            expected = f"{pool.dtype} {(len(layers), 2, 'T', len(heads), dim)}"
            raise ValueError(f"piece: {piece.dtype} {tuple(piece.shape)}, expected {expected}")
        if not 0 <= self.first_token <= self.first_token + num_tokens <= len(block_ids) * block_size:
            raise ValueError(f"first_token: {self.first_token} and {num_tokens} tokens are not within {len(block_ids)} blocks")
        return heads

    @property
    def slots(self) -> Tensor:
        """[tokens of the piece] of a pool whose blocks are one behind the other."""
        block_size, end = self.pool.shape[3], self.first_token + self.piece.shape[2]
        tokens = torch.arange(self.first_token, end, device=self.block_ids.device)
        return self.block_ids[tokens // block_size].long() * block_size + tokens % block_size


class BlockCopies(Protocol):
    """Never synchronizes. Both raise ValueError, see Move."""

    def gather(self, move: Move) -> None:
        """Fill the piece with what lies in the pool."""
        ...

    def scatter(self, move: Move) -> None:
        """Write the piece into the pool, and nothing beside it."""
        ...


class IndexedBlocks:
    """By torch's indexing: the reference, and what there is without Triton."""

    def gather(self, move: Move) -> None:
        movable(move.piece).copy_(_flat(move)[:, :, move.slots])

    def scatter(self, move: Move) -> None:
        _flat(move)[:, :, move.slots] = movable(move.piece)


def block_copies_for(device: torch.device) -> BlockCopies:
    """Triton's where it runs."""
    if why_not_here(device.type):
        return IndexedBlocks()
    from pdmesh.engine.kernels.triton.blocks import TritonBlocks

    return TritonBlocks()


def _flat(move: Move) -> Tensor:
    """[layers, 2, slots, heads, head_dim]: a view of what the move is about."""
    heads = move.check()
    return movable(move.pool)[move.layers.start : move.layers.stop, :, :, :, heads.start : heads.stop].flatten(2, 3)


def movable(numbers: Tensor) -> Tensor:
    """The same memory, as what torch's indexing takes on every device: float8 as bytes."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers
