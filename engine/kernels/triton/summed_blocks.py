"""Blocks of a pool summed, or into a contiguous room and summed as they are stored, or back if the sum is right.

    pool [layers, 2, blocks, BLOCK_WORDS]   ids  7 | 2 | 9        one program: WORDS words of a block of a plane
    room [layers of a part, 2, ids, BLOCK_WORDS]                  a plane: keys, or values, of a layer

What is summed, and why: engine/summed_copies.py. Each program adds its share to one of NUM_SUMS words. A gather of n bytes reads
and writes n, a sum reads n: 64 MiB take 40 and 20 us at 3.3 TB/s. Reads of a pool in another process of the same GPU are as
those of one's own; of another GPU they cross NVLink or PCIe.

Lengths and places are no constants and not specialized on, so that a part of another shape compiles nothing while requests run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.sampling_numbers import mix
from engine.summed_copies import NUM_SUMS, Blocks

_MOST_WORDS = 1024  # of a program: with 4 warps 8 words a thread, in 16 byte accesses
_PLACES = ("num_blocks", "pool_blocks", "layer_start")


@triton.jit(do_not_specialize=_PLACES)
def sum_kernel(
    pool: tl.tensor,
    room: tl.tensor,
    block_ids: tl.tensor,
    sums: tl.tensor,
    num_blocks: tl.tensor,
    pool_blocks: tl.tensor,
    layer_start: tl.tensor,
    BLOCK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    SUMS: tl.constexpr,
    STORES: tl.constexpr,
) -> None:
    """STORES: into the room, too."""
    share, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHUNKS: tl.constexpr = (BLOCK_WORDS + WORDS - 1) // WORDS
    at = share % CHUNKS * WORDS + tl.arange(0, WORDS)
    inside = at < BLOCK_WORDS
    block = tl.load(block_ids + share // CHUNKS).to(tl.int64)
    there = ((2 * layer_start + plane) * pool_blocks + block) * BLOCK_WORDS + at
    here = (plane * num_blocks + share // CHUNKS) * BLOCK_WORDS + at
    words = tl.load(pool + there, mask=inside, other=0)
    if STORES:
        tl.store(room + here, words, mask=inside)
    mixed = mix(words.to(tl.uint64, bitcast=True) ^ (here.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    total = tl.sum(tl.where(inside, mixed.to(tl.int64, bitcast=True), 0))
    tl.atomic_add(sums + (share + plane) % SUMS, total, sem="relaxed")


@triton.jit(do_not_specialize=_PLACES)
def scatter_kernel(
    pool: tl.tensor,
    room: tl.tensor,
    block_ids: tl.tensor,
    sums: tl.tensor,
    expected: tl.tensor,
    num_blocks: tl.tensor,
    pool_blocks: tl.tensor,
    layer_start: tl.tensor,
    BLOCK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    SUMS: tl.constexpr,
) -> None:
    share, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHUNKS: tl.constexpr = (BLOCK_WORDS + WORDS - 1) // WORDS
    is_right = tl.sum(tl.load(sums + tl.arange(0, SUMS))) == tl.load(expected)
    at = share % CHUNKS * WORDS + tl.arange(0, WORDS)
    stored = (at < BLOCK_WORDS) & is_right
    block = tl.load(block_ids + share // CHUNKS).to(tl.int64)
    there = ((2 * layer_start + plane) * pool_blocks + block) * BLOCK_WORDS + at
    here = (plane * num_blocks + share // CHUNKS) * BLOCK_WORDS + at
    tl.store(pool + there, tl.load(room + here, mask=stored, other=0), mask=stored)


class TritonSums:
    """Satisfies engine.summed_copies.SummedCopies."""

    def sum(self, blocks: Blocks, sums: torch.Tensor) -> None:
        blocks.check()
        grid, places, sizes = _launch(blocks)
        sum_kernel[grid](blocks.pool, blocks.pool, blocks.block_ids, sums, *places, **sizes, STORES=False)

    def gather(self, blocks: Blocks, room: torch.Tensor, sums: torch.Tensor) -> None:
        blocks.check(room)
        grid, places, sizes = _launch(blocks)
        sum_kernel[grid](blocks.pool, room, blocks.block_ids, sums, *places, **sizes, STORES=True)

    def scatter(self, blocks: Blocks, room: torch.Tensor, sums: torch.Tensor, expected: torch.Tensor) -> None:
        blocks.check(room)
        grid, places, sizes = _launch(blocks)
        scatter_kernel[grid](blocks.pool, room, blocks.block_ids, sums, expected, *places, **sizes)


def _launch(blocks: Blocks) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """Grid, _PLACES and constants."""
    block_words = blocks.pool.shape[3]
    words = min(_MOST_WORDS, triton.next_power_of_2(block_words))
    num_blocks, pool_blocks = len(blocks.block_ids), blocks.pool.shape[2]
    grid = (num_blocks * triton.cdiv(block_words, words), 2 * len(blocks.layers))
    sizes = {"BLOCK_WORDS": block_words, "WORDS": words, "SUMS": NUM_SUMS, "num_warps": 4}
    return grid, (num_blocks, pool_blocks, blocks.layers.start), sizes
