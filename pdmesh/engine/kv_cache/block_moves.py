"""What a copy of KV blocks is about: which tokens of which blocks and layers go where. The types that kernels and their callers
share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Move:
    """Describe a move between blocks and a piece. pool [num_layers, 2, num_blocks, block_size, num_heads, head_dim], contiguous;
    block_ids int32 on its device, within it; `heads`: the piece's range of the pool's heads; None: all."""

    pool: Tensor
    layers: range
    block_ids: Tensor
    piece: Tensor
    first_token: int = 0
    heads: range | None = None

    def check(self) -> range:
        """Return the heads. Raises ValueError naming what does not fit."""
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
        """Return [tokens of the piece] slots of the pool seen as consecutive slots."""
        block_size, end = self.pool.shape[3], self.first_token + self.piece.shape[2]
        tokens = torch.arange(self.first_token, end, device=self.block_ids.device)
        return self.block_ids[tokens // block_size].long() * block_size + tokens % block_size


class BlockCopies(Protocol):
    """Copy between blocks and pieces, without synchronizing. Both methods raise ValueError, see Move."""

    def gather(self, move: Move) -> None:
        """Fill the piece from the pool."""
        ...

    def scatter(self, move: Move) -> None:
        """Write the piece into the pool, and nothing else."""
        ...


NUM_SUMS = 64  # a launch adds into so many words, so that its programs do not all wait for one


@dataclass(frozen=True)
class Blocks:
    """Describe blocks of a pool int64 [num_layers, 2, num_blocks, words of a block], contiguous; block_ids int32, within it, on
    the device that copies. In this order they are a part in wire order (kvtransfer/manifest.py)."""

    pool: Tensor
    layers: range
    block_ids: Tensor

    def check(self) -> None:
        """Raise ValueError naming what does not fit."""
        num_layers = self.pool.shape[0]
        if self.pool.dtype != torch.int64 or self.pool.dim() != 4 or not self.pool.is_contiguous():
            shape = f"{self.pool.dtype} {tuple(self.pool.shape)}"
            raise ValueError(f"pool: {shape}, expected contiguous int64 [layers, 2, blocks, words]")
        if not 0 <= self.layers.start < self.layers.stop <= num_layers or self.layers.step != 1:
            raise ValueError(f"layers: {self.layers} is not within the pool's {num_layers}")
        if self.block_ids.dtype != torch.int32 or self.block_ids.dim() != 1 or not self.block_ids.is_contiguous():
            raise ValueError(f"block_ids: {self.block_ids.dtype} {tuple(self.block_ids.shape)}, expected int32 [blocks]")

    def check_fits(self, source: Blocks) -> None:
        """Raise ValueError unless `source` has as many blocks of the same size, and as many layers."""
        ours, theirs = ((each.layers, len(each.block_ids), each.pool.shape[3]) for each in (self, source))
        if ours != theirs:
            raise ValueError(f"source: {theirs} of layers, blocks and words of a block do not go where {ours} are")


class SummedCopies(Protocol):
    """Sum and copy without synchronizing. sums int64 [NUM_SUMS]: sums are added to any of them. All raise ValueError, see
    Blocks."""

    def sum(self, blocks: Blocks, sums: Tensor) -> None: ...

    def copy(self, source: Blocks, target: Blocks, sums: Tensor) -> None:
        """Copy from one pool into another and sum what is stored: the source may change meanwhile."""
        ...
