"""Tokens of KV blocks into one contiguous piece, and back, by what computes on the pool's device.

    piece [len(layers), 2, tokens, heads, head_dim]: token t of it is token first_token + t of the blocks, in their order

A piece of whole blocks with all heads is a part as it travels (kvtransfer/parts.py): per layer all keys, then all values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.triton.support import why_not_here


class BlockCopies(Protocol):
    """pool [num_layers, 2, num_blocks, block_size, num_heads, head_dim], contiguous; block_ids int32 on its device, within it;
    `heads`: a range of the pool's, those of the piece; None: all. Never synchronizes. Raises ValueError naming what does not fit.
    """

    def gather(
        self,
        pool: Tensor,
        layers: range,
        block_ids: Tensor,
        piece: Tensor,
        *,
        first_token: int = 0,
        heads: range | None = None,
    ) -> None:
        """Fill `piece` with what lies in the pool."""
        ...

    def scatter(
        self,
        pool: Tensor,
        layers: range,
        block_ids: Tensor,
        piece: Tensor,
        *,
        first_token: int = 0,
        heads: range | None = None,
    ) -> None:
        """Write `piece` into the pool, and nothing beside it."""
        ...


class IndexedBlocks:
    """By torch's indexing: the reference, and what there is without Triton."""

    def gather(
        self,
        pool: Tensor,
        layers: range,
        block_ids: Tensor,
        piece: Tensor,
        *,
        first_token: int = 0,
        heads: range | None = None,
    ) -> None:
        heads = check_move(pool, layers, block_ids, piece, first_token, heads)
        slots = _slots(block_ids, pool.shape[3], first_token, piece.shape[2])
        flat = pool[layers.start : layers.stop].flatten(2, 3)
        piece.copy_(flat[:, :, slots][:, :, :, heads.start : heads.stop])

    def scatter(
        self,
        pool: Tensor,
        layers: range,
        block_ids: Tensor,
        piece: Tensor,
        *,
        first_token: int = 0,
        heads: range | None = None,
    ) -> None:
        heads = check_move(pool, layers, block_ids, piece, first_token, heads)
        slots = _slots(block_ids, pool.shape[3], first_token, piece.shape[2])
        flat = pool[layers.start : layers.stop, :, :, :, heads.start : heads.stop].flatten(2, 3)
        flat[:, :, slots] = piece


def block_copies_for(device: torch.device) -> BlockCopies:
    """Triton's where it runs."""
    if why_not_here(device.type):
        return IndexedBlocks()
    from engine.kernels.triton.blocks import TritonBlocks

    return TritonBlocks()


def check_move(pool: Tensor, layers: range, block_ids: Tensor, piece: Tensor, first_token: int, heads: range | None) -> range:
    """The heads. Raises ValueError naming what does not fit."""
    num_layers, _, _, block_size, num_heads, dim = pool.shape
    heads = range(num_heads) if heads is None else heads
    if not pool.is_contiguous() or not piece.is_contiguous():
        raise ValueError("pool, piece: they must be contiguous")
    if not 0 <= layers.start < layers.stop <= num_layers or layers.step != 1:
        raise ValueError(f"layers: {layers} is not within the pool's {num_layers}")
    if not 0 <= heads.start < heads.stop <= num_heads or heads.step != 1:
        raise ValueError(f"heads: {heads} is not within the pool's {num_heads}")
    if block_ids.dim() != 1 or block_ids.dtype != torch.int32 or not block_ids.is_contiguous():
        raise ValueError(f"block_ids: {block_ids.dtype} {tuple(block_ids.shape)}, expected int32 [blocks]")
    num_tokens = piece.shape[2] if piece.dim() == 5 else 0
    if piece.shape != (len(layers), 2, num_tokens, len(heads), dim) or piece.dtype != pool.dtype:
        raise ValueError(
            f"piece: {piece.dtype} {tuple(piece.shape)}, expected {pool.dtype} {(len(layers), 2, 'T', len(heads), dim)}"
        )
    if not 0 <= first_token <= first_token + num_tokens <= len(block_ids) * block_size:
        raise ValueError(f"first_token: {first_token} and {num_tokens} tokens are not within {len(block_ids)} blocks")
    return heads


def _slots(block_ids: Tensor, block_size: int, first_token: int, num_tokens: int) -> Tensor:
    """[num_tokens] of the flat pool."""
    tokens = torch.arange(first_token, first_token + num_tokens, device=block_ids.device)
    return block_ids[tokens // block_size].long() * block_size + tokens % block_size
