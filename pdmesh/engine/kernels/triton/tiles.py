"""Shapes of attention's tiles: constants by head dimension and width of a key, never tuned while serving, so that bits do not
change.

Keys of a tile are the same for both kernels, since a row's bits depend on them. Rows are not: on Hopper a group of four warps
multiplies 64 rows at a time, each row within one warp, with 64 rows and 4 warps as with 128 rows and 8. The figures below are
counted, not measured.

- split (memory bound): 64 rows, of which decode uses one group. The idle ones cost little: 64 operations for each byte of keys,
  300 TFLOPS at 4.8 TB/s, a third of what the matrix units do; in return decode and prefill have the same instructions. Stages
  keep 64 KB or more of keys on their way per program, and two programs fit into a multiprocessor's 228 KB.
- walk (compute bound): 128 rows with 8 warps, so that the accumulators of a split and of all splits fit into registers (64 + 64
  each per thread for head_dim 128); for head_dim 256 half the rows, and the accumulator of all splits (128 registers) is kept
  in local memory while a split is under way. 8 warps would hold it, but then both groups of four multiply all of the
  queries with the keys, in steps of 16 keys: 1.5 times the matrix units' time, or 2.5 where they wait for the queries.
- float32 has no matrix units that are exact: an element at a time, every product written out. Tiles are as small as keeps
  accumulators and both factors in registers. For tests and small models; 1/15 of bfloat16's operations a second at best.

On a GPU with less shared memory than Hopper tiles are the same, as bits depend on them, and the pipeline is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

# Shared memory that a program may have: it limits tiles and pipelines on GPUs other than Hopper's.


HOPPER_BYTES = 232_448
"""Bytes of an H100 or H200, 227 KiB; an A100 has 166,912 (163), an L40S, A10 or RTX 4090 101,376 (99)."""


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the most that one program may use. Where there is no GPU (the interpreter, tests) as much as on Hopper."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Tiles:
    """Describe tiles: `keys` of a tile; rows, warps and pipeline stages of either kernel."""

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
_FLOAT32 = {
    64: Tiles(32, 16, 4, 1, 16, 4, 1),
    128: Tiles(32, 16, 8, 1, 16, 8, 1),
    256: Tiles(16, 16, 8, 1, 16, 8, 1),
}


def padded_dim(head_dim: int) -> int:
    """Return the columns of a tile: a power of two, and at least the 16 that a product takes. Raises ValueError beyond
    MAX_HEAD_DIM."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim: {head_dim} is not in 1 to {MAX_HEAD_DIM}")
    return max(16, 1 << (head_dim - 1).bit_length())


def choose_tiles(head_dim: int, item_size: int, room: int = HOPPER_BYTES) -> Tiles:
    """Return the tiles. `item_size`: bytes of an element of the query. `room`: bytes of shared memory that a program may have.
    Raises ValueError where not even a pipeline of one stage fits."""
    padded = max(64, padded_dim(head_dim))
    return _fitting((_FLOAT32 if item_size == 4 else _BY_PADDED_DIM)[padded], padded, item_size, room)


def _fitting(tiles: Tiles, padded: int, item_size: int, room: int) -> Tiles:
    def stages(rows: int, most: int) -> int:
        for number in range(most, 0, -1):
            if shared_bound(tiles.keys, rows, padded, item_size, number) <= room:
                return number
        raise ValueError(f"head_dim: tiles of {padded} columns do not fit into {room} bytes of shared memory")

    split, walk = stages(tiles.split_rows, tiles.split_stages), stages(tiles.walk_rows, tiles.walk_stages)
    return replace(tiles, split_stages=split, walk_stages=walk)


@dataclass(frozen=True)
class LatentTiles:
    """Describe tiles of latent attention: each half of a latent is `main` and `rest` columns, both powers of two; 8 warps hold
    the sums of 64 rows of 512 numbers, or twice those of 32, in some 140 registers a thread."""

    main: int
    rest: int
    keys: int
    split_rows: int
    walk_rows: int
    warps: int
    stages: int

    @classmethod
    def of(cls, width: int, item_size: int, room: int = HOPPER_BYTES) -> LatentTiles:
        """Return the tiles. Raises ValueError where not even a pipeline of one stage fits."""
        main, rest = latent_columns(width)
        keys, rows, walk_rows, most = (16, 16, 16, 1) if item_size == 4 else (32, 64, 32, 2)
        for stages in range(most, 0, -1):
            tiles = cls(main, rest, keys, rows, walk_rows, 8, stages)
            if tiles.shared_bound(item_size) <= room:
                return tiles
        raise ValueError(f"latents of {width} numbers do not fit into {room} bytes of shared memory")

    def shared_bound(self, item_size: int) -> int:
        """Return bytes of shared memory, no less than the compiler takes: queries, keys of all stages, and weights."""
        columns = 2 * (self.main + self.rest)
        return (self.split_rows + self.stages * self.keys) * columns * item_size + self.split_rows * self.keys * 4 + 4096


def latent_columns(width: int) -> tuple[int, int]:
    """Return the two powers of two that a half of a latent is divided into, 16 at least."""
    half = width // 2
    main = max(16, 1 << ((half - 1).bit_length() - 1))
    return main, max(16, 1 << (max(1, half - main) - 1).bit_length())


def shared_bound(keys: int, rows: int, columns: int, item_size: int, stages: int) -> int:
    """Return bytes of shared memory, no less than the compiler takes: queries, keys and values of all stages (of one stage: keys
    and weights only, one after the other), sums of rows."""
    tile = columns * item_size
    waiting = 2 * stages * keys * tile if stages > 1 else keys * tile + 4 * rows * keys
    return rows * tile + waiting + 2048
