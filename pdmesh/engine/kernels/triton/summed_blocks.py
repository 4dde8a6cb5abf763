"""Blocks of a pool summed, and into another pool, summed as they are stored.

    source [layers, 2, blocks, BLOCK_WORDS]   ids  7 | 2 | 9     one program: WORDS words of a block of a plane
    target [layers, 2, blocks, BLOCK_WORDS]   ids  3 | 4 | 1     a plane: keys, or values, of a layer

What is summed, and why: engine/summed_copies.py. Each program adds its share to one of NUM_SUMS words. A copy of n bytes reads
and writes n, a sum reads n: a gigabyte would take 0.6 and 0.3 ms at 3.3 TB/s. Reads of a pool in another process of the same GPU
are as those of one's own; of another GPU they cross NVLink or PCIe.

Lengths and places are no constants and not specialized on, so that a part of another shape compiles nothing while requests run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.sampling_numbers import mix
from pdmesh.engine.kv_cache.summed_copies import NUM_SUMS, Blocks

_MOST_WORDS = 1024  # of a program: with 4 warps 8 words a thread, in 16 byte accesses
_PLACES = ("num_blocks", "source_blocks", "target_blocks", "layer_start")


@triton.jit(do_not_specialize=_PLACES)
def sum_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_ids: tl.tensor,
    target_ids: tl.tensor,
    sums: tl.tensor,
    num_blocks: tl.tensor,
    source_blocks: tl.tensor,
    target_blocks: tl.tensor,
    layer_start: tl.tensor,
    BLOCK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    SUMS: tl.constexpr,
    STORES: tl.constexpr,
) -> None:
    """STORES: into the target, too."""
    share, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHUNKS: tl.constexpr = (BLOCK_WORDS + WORDS - 1) // WORDS
    index, at = share // CHUNKS, share % CHUNKS * WORDS + tl.arange(0, WORDS)
    inside = at < BLOCK_WORDS
    block = tl.load(source_ids + index).to(tl.int64)
    words = tl.load(source + ((2 * layer_start + plane) * source_blocks + block) * BLOCK_WORDS + at, mask=inside, other=0)
    if STORES:
        block = tl.load(target_ids + index).to(tl.int64)
        tl.store(target + ((2 * layer_start + plane) * target_blocks + block) * BLOCK_WORDS + at, words, mask=inside)
    place = (plane * num_blocks + index) * BLOCK_WORDS + at  # in the part as it travels
    mixed = mix(words.to(tl.uint64, bitcast=True) ^ (place.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    total = tl.sum(tl.where(inside, mixed.to(tl.int64, bitcast=True), 0))
    tl.atomic_add(sums + (share + plane) % SUMS, total, sem="relaxed")


class TritonSums:
    """Satisfies pdmesh.engine.kv_cache.summed_copies.SummedCopies."""

    def sum(self, blocks: Blocks, sums: torch.Tensor) -> None:
        blocks.check()
        _launch_summed(blocks, blocks, sums, stores=False)

    def copy(self, source: Blocks, target: Blocks, sums: torch.Tensor) -> None:
        source.check()
        target.check()
        target.check_fits(source)
        _launch_summed(source, target, sums, stores=True)


def _launch_summed(source: Blocks, target: Blocks, sums: torch.Tensor, *, stores: bool) -> None:
    block_words, num_blocks = source.pool.shape[3], len(source.block_ids)
    words = min(_MOST_WORDS, triton.next_power_of_2(block_words))
    grid = (num_blocks * triton.cdiv(block_words, words), 2 * len(source.layers))
    places = num_blocks, source.pool.shape[2], target.pool.shape[2], source.layers.start
    sum_kernel[grid](
        source.pool, target.pool, source.block_ids, target.block_ids, sums, *places,
        BLOCK_WORDS=block_words, WORDS=words, SUMS=NUM_SUMS, STORES=stores, num_warps=4,
    )  # fmt: skip
