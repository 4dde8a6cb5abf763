"""Shapes of attention's tiles: constants by head dimension and width of a key, never tuned while serving, so that bits stay.

Keys of a tile are the same for both kernels, since a row's bits depend on them. Rows are not: on Hopper a group of four warps
multiplies 64 rows at a time, each row within one warp, with 64 rows and 4 warps as with 128 rows and 8. What follows is counted,
not measured.

- split (memory bound): 64 rows, of which decode uses one group. The idle ones cost little: 64 operations for each byte of keys,
  300 TFLOPS at 4.8 TB/s, a third of what the matrix units do; in return decode and prefill have the same instructions. Stages
  keep 64 KB or more of keys on their way per program, and two programs fit into a multiprocessor's 228 KB.
- walk (compute bound): 128 rows with 8 warps, so that the accumulators of a split and of all splits fit into registers (64 + 64
  each per thread for head_dim 128); for head_dim 256 half the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Tiles:
    """`keys` of a tile; rows, warps and pipeline stages of either kernel."""

    keys: int
    split_rows: int
    split_warps: int
    split_stages: int
    walk_rows: int
    walk_warps: int
    walk_stages: int


_BY_PADDED_DIM = {
    64: Tiles(128, 64, 4, 3, 128, 8, 3),
    128: Tiles(64, 64, 4, 3, 128, 8, 3),
    256: Tiles(32, 64, 4, 3, 64, 4, 3),
}
# float32 is multiplied without matrix units, an element at a time: for tests and small models only.
_FLOAT32 = Tiles(64, 32, 4, 1, 32, 4, 1)


def padded_dim(head_dim: int) -> int:
    """Columns of a tile: a power of two, and at least the 16 that a product takes. Raises ValueError beyond MAX_HEAD_DIM."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim: {head_dim} is not in 1 to {MAX_HEAD_DIM}")
    return max(16, 1 << (head_dim - 1).bit_length())


def choose_tiles(head_dim: int, item_size: int) -> Tiles:
    """`item_size`: bytes of an element of the query."""
    padded = padded_dim(head_dim)
    return _FLOAT32 if item_size == 4 else _BY_PADDED_DIM[max(64, padded)]
