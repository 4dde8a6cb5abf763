"""Tokens of KV blocks into one contiguous piece, and back: what is handed from one worker's GPU to another's memory.

    pool [layers, 2, blocks, block_size, heads, head_dim]        piece [layers of a group, 2, tokens, heads of a range, head_dim]
                   block ids  7 | 2 | 9
    tokens       . . a b | c d e f | g .       ─ gather ─►   a b c d e f g            ─ scatter ─►   the same, over other blocks
                     └ first_token 2

A piece of whole blocks is a part as the transports send it (kvtransfer/parts.py). Numbers are moved as bytes, in words as wide
as a token's share allows, so any dtype will do. One launch each; bytes read = bytes written = the piece's: 8 MiB would take 5 us
at 3.3 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdmesh.engine.kv_cache.copies import Move

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
    num_words = num_tokens * SHARE_WORDS  # whose alignment the compiler sees, whatever the number of tokens
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
    """Satisfies pdmesh.engine.kv_cache.copies.BlockCopies."""

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
