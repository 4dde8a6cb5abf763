"""Gather and scatter in one launch equal plain indexing, bit for bit, and touch nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.blocks import TritonBlocks
from pdmesh.engine.kv_cache.block_moves import BlockCopies, Move
from pdmesh.engine.kv_cache.copies import IndexedBlocks
from tests.engine.kernels.triton.paged import DEVICE

DTYPES = [torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn]
LAYERS = range(1, 3)


def random_pool(dtype: torch.dtype, *, block_size: int = 4, heads: int = 4, dim: int = 8, seed: int = 0) -> Tensor:
    """[3, 2, 9, ...] of random bytes: what moves is not looked at."""
    shape = (3, 2, 9, block_size, heads, dim * dtype.itemsize)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator).to(DEVICE).view(dtype)


def plain(pool: Tensor, block_ids: list[int], first: int, num_tokens: int, heads: range) -> Tensor:
    """The piece, token by token."""
    block_size = pool.shape[3]
    tokens = [(block_ids[t // block_size], t % block_size) for t in range(first, first + num_tokens)]
    return torch.stack([pool[LAYERS.start : LAYERS.stop, :, b, s, heads.start : heads.stop] for b, s in tokens], 2)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int8)


def ids(*block_ids: int) -> Tensor:
    return torch.tensor(block_ids, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("dtype", "heads"), zip(DTYPES, [range(4), range(2), range(3, 4), range(1, 4)], strict=True), ids=str)
@pytest.mark.parametrize(
    ("block_ids", "first", "num_tokens"),
    [
        ([7, 2, 8, 0], 0, 16),  # whole blocks, in no order
        ([5], 0, 4),
        ([5], 2, 1),  # one token within a block
        ([7, 2, 8], 3, 7),  # the end of the first to the middle of the last
        ([1, 3, 4], 6, 2),  # none of the first block, none of the last
    ],
)
def test_both_ways(dtype: torch.dtype, heads: range, block_ids: list[int], first: int, num_tokens: int) -> None:
    source, target, table = random_pool(dtype), random_pool(dtype, seed=1), [6, 0, 3, 5][: len(block_ids)]
    expected = plain(source, block_ids, first, num_tokens, heads)
    for copies in (IndexedBlocks(), TritonBlocks()):
        piece = torch.zeros_like(expected)
        copies.gather(Move(source, LAYERS, ids(*block_ids), piece, first, heads))
        assert torch.equal(raw(piece), raw(expected))
        filled = target.clone()
        copies.scatter(Move(filled, LAYERS, ids(*table), piece, first, heads))
        assert torch.equal(raw(filled), raw(_written(target, table, first, expected, heads)))


def _written(pool: Tensor, block_ids: list[int], first: int, piece: Tensor, heads: range) -> Tensor:
    written, block_size = pool.clone(), pool.shape[3]
    for index in range(piece.shape[2]):
        block, slot = block_ids[(first + index) // block_size], (first + index) % block_size
        written[LAYERS.start : LAYERS.stop, :, block, slot, heads.start : heads.stop] = piece[:, :, index]
    return written


@pytest.mark.parametrize(("heads", "dim", "dtype"), [(1, 80, torch.float16), (3, 5, torch.float16), (2, 3, torch.int8)])
def test_shares_of_a_token_that_are_no_power_of_two(heads: int, dim: int, dtype: torch.dtype) -> None:
    """Words of 8, 2 and 1 bytes; more of them than one program moves."""
    pool = random_pool(dtype, block_size=16, heads=heads, dim=dim)
    expected = plain(pool, [8, 1, 2, 6, 0], 0, 80, range(heads))
    piece = torch.zeros_like(expected)
    TritonBlocks().gather(Move(pool, LAYERS, ids(8, 1, 2, 6, 0), piece))
    assert torch.equal(raw(piece), raw(expected))


def test_a_piece_of_whole_blocks_lies_as_a_part_travels() -> None:
    """Per layer all keys, then all values, each block as in the pool: what `part_views` shows of a pool in CPU memory."""
    pool = random_pool(torch.float16)
    piece = torch.empty((2, 2, 12, 4, 8), dtype=torch.float16, device=DEVICE)
    TritonBlocks().gather(Move(pool, LAYERS, ids(7, 2, 8), piece))
    travels = [pool[layer, kv, block] for layer in LAYERS for kv in (0, 1) for block in (7, 2, 8)]
    assert torch.equal(raw(piece).flatten(), torch.cat([raw(block).flatten() for block in travels]))


@pytest.mark.parametrize("copies", [IndexedBlocks(), TritonBlocks()], ids=["torch", "triton"])
def test_what_does_not_fit_is_refused_by_name(copies: BlockCopies) -> None:
    pool = random_pool(torch.float16)
    good: dict[str, Any] = {
        "pool": pool,
        "layers": LAYERS,
        "block_ids": ids(1, 2),
        "piece": torch.zeros((2, 2, 8, 4, 8), dtype=torch.float16, device=DEVICE),
    }
    cases: dict[str, dict[str, Any]] = {
        "layers": {"layers": range(2, 4)},
        "heads": {"heads": range(3, 5)},
        "piece: ": {"heads": range(2)},
        "piece: torch.float32": {"piece": good["piece"].float()},
        "block_ids": {"block_ids": ids(1, 2).long()},
        "first_token": {"first_token": 1},
        "contiguous": {"pool": pool.transpose(1, 2)},
    }
    for name, changed in cases.items():
        for move in (copies.gather, copies.scatter):
            with pytest.raises(ValueError, match=name):
                move(Move(**{**good, **changed}))
