"""Tokens of KV blocks into one contiguous piece and back, for the hand-off between workers, and sums of blocks.

    pool [layers, 2, blocks, block_size, heads, head_dim]        piece [layers of a group, 2, tokens, heads of a range, head_dim]
                   block ids  7 | 2 | 9
    tokens       . . a b | c d e f | g .       ─ gather ─►   a b c d e f g            ─ scatter ─►   the same, over other blocks
                     └ first_token 2

A piece of whole blocks is a part as the transports send it (kvtransfer/manifest.py). Numbers are moved as bytes, in words as wide
as a token's share allows, so any dtype will do. One launch each; bytes read = bytes written = the piece's: 8 MiB would take 5 us
at 3.3 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.sampling.kernels import mix
from pdmesh.engine.kv_cache.block_moves import NUM_SUMS, Blocks, Move

_WORDS = 1024  # of a program: with 4 warps 8 words a thread, in 16 byte accesses where a token's share is a multiple of them
_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["num_tokens", "first_token"])
def move_kernel(
    pool: tl.tensor,
    piece: tl.tensor,
    block_ids: tl.tensor,
    num_tokens: tl.tensor,
    first_token: tl.tensor,
    first_word: tl.tensor,
    plane_words: tl.tensor,
    TOKEN_WORDS: tl.constexpr,
    SHARE_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GATHERS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Program: WORDS words of a plane (keys or values of a layer) of the piece, which has num_tokens in each."""
    num_words = num_tokens * SHARE_WORDS  # the compiler sees its alignment, whatever the number of tokens
    plane = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = at < num_words
    token = first_token + at // SHARE_WORDS
    block = tl.load(block_ids + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + token % BLOCK_SIZE
    in_pool = pool + plane * plane_words + slot * TOKEN_WORDS + first_word + at % SHARE_WORDS
    in_piece = piece + plane * num_words + at
    if GATHERS:
        tl.store(in_piece, tl.load(in_pool, mask=inside, other=0), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_piece, mask=inside, other=0), mask=inside)


class TritonBlocks:
    """Satisfy pdmesh.engine.kv_cache.copies.BlockCopies with Triton kernels."""

    def gather(self, move: Move) -> None:
        _launch(move, gathers=True)

    def scatter(self, move: Move) -> None:
        _launch(move, gathers=False)


def _launch(move: Move, *, gathers: bool) -> None:
    heads, pool, piece = move.check(), move.pool, move.piece
    block_size, num_heads, dim = pool.shape[3:]
    head_bytes = dim * pool.element_size()
    word = next(size for size in _TYPES if head_bytes % size == 0)
    words = [tensor.view(_TYPES[word]) for tensor in (pool[move.layers.start : move.layers.stop], piece)]
    share_words = len(heads) * head_bytes // word
    num_words = piece.shape[2] * share_words
    if not num_words:
        return
    grid = (2 * len(move.layers), triton.cdiv(num_words, _WORDS))
    move_kernel[grid](
        *words, move.block_ids, piece.shape[2], move.first_token, heads.start * head_bytes // word, words[0][0, 0].numel(),
        TOKEN_WORDS=num_heads * head_bytes // word, SHARE_WORDS=share_words, BLOCK_SIZE=block_size,
        GATHERS=gathers, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip


# Sums of blocks of a pool, and copies into another pool that are summed as they are stored
#
#     source [layers, 2, blocks, BLOCK_WORDS]   ids  7 | 2 | 9     one program: WORDS words of a block of a plane
#     target [layers, 2, blocks, BLOCK_WORDS]   ids  3 | 4 | 1     a plane: keys, or values, of a layer
#
# pdmesh/engine/kv_cache/ipc_pool.py says what is summed, and why. Each program adds its share to one of NUM_SUMS words. A copy of
# n bytes reads and writes n, a sum reads n: a gigabyte would take 0.6 and 0.3 ms at 3.3 TB/s. Reads of a pool in another process
# of the same GPU are as fast as of its own; of another GPU they cross NVLink or PCIe.
#
# Lengths and positions are neither constants nor specialized on, so that a part of another shape compiles nothing while requests
# run.


_MOST_WORDS = 1024  # words of a program: with 4 warps 8 words a thread, in 16 byte accesses
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
    """Sum the words of a part; STORES: also write them into the target."""
    share, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHUNKS: tl.constexpr = (BLOCK_WORDS + WORDS - 1) // WORDS
    index, at = share // CHUNKS, share % CHUNKS * WORDS + tl.arange(0, WORDS)
    inside = at < BLOCK_WORDS
    block = tl.load(source_ids + index).to(tl.int64)
    words = tl.load(source + ((2 * layer_start + plane) * source_blocks + block) * BLOCK_WORDS + at, mask=inside, other=0)
    if STORES:
        block = tl.load(target_ids + index).to(tl.int64)
        tl.store(target + ((2 * layer_start + plane) * target_blocks + block) * BLOCK_WORDS + at, words, mask=inside)
    place = (plane * num_blocks + index) * BLOCK_WORDS + at  # position in the part in wire order
    mixed = mix(words.to(tl.uint64, bitcast=True) ^ (place.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    total = tl.sum(tl.where(inside, mixed.to(tl.int64, bitcast=True), 0))
    tl.atomic_add(sums + (share + plane) % SUMS, total, sem="relaxed")


class TritonSums:
    """Satisfy pdmesh.engine.kv_cache.ipc_pool.SummedCopies with Triton kernels."""

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
