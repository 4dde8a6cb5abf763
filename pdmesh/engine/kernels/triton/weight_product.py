"""Products with weights in words: which kernel for how many rows, in which shares, and the launch.

What limits it on an H200 (132 multiprocessors, 4.8 TB/s, 790 TFLOP/s measured in bfloat16). A product of M rows with [N, K] reads
N K bits / 8 bytes of weights (int4: and 4 bytes a group, half a bit a weight more with groups of 64) and M (N + K) activations,
and does 2 M N K operations. Bandwidth allows 36 bytes a nanosecond and multiprocessor, at 1.8 GHz 20 bytes a clock: 20 int8 or 40
int4 weights a clock. Against that stand, a clock, 128 float32 operations, 64 integer ones and 2048 fused tensor-core ones.

- `vector_kernel`: M + 1 float32 operations and 1.1 integer ones a weight. int8 keeps up with memory to M = 5 and has
  70 % of it at 8; int4 to M = 2, 64 % at 4 and 40 % at 8.
- `tile_kernel`: about 2.5 float32 and 1.6 integer operations a weight, whatever M: within memory's time for int8, about it for
  int4. Its tensor-core work passes the memory time at M of about 80 (int8) or 40 (int4).
- Expanding costs one more write and read of 2 bytes a weight, and then runs at the library's speed.

So int4 changes from vectors to tiles at a lower M than int8. These are counts, not measurements: nothing here has been timed.

Fixed configurations, by shape only (an autotuner would change the split, and with it the bits, from one start to the next):
64 outputs a program (4 rows a thread share each activation), 4 warps, and so many shares of the inputs that about four programs
come to each multiprocessor: with 8 KiB in flight each that covers the latency of memory. Shares are 2 input tiles at least. Only
the tile kernel's rows and stages follow from the device: as many as fit into its shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from pdmesh.engine.kernels.triton.room import shared_bytes
from pdmesh.engine.kernels.triton.weight_kernels import expand_kernel, tile_kernel, vector_kernel
from pdmesh.engine.kernels.triton.weight_words import TILE_ROWS, TILE_WORDS, WeightWords

VECTOR_ROWS = {"int4": 4, "int8": 8, "fp8": 8}  # up to so many rows the vector kernel
TILE_ROWS_MAX = 128  # up to so many the tile kernel; above, expand and torch.mm
INVARIANT_BLOCK = 16  # rows of the one tile that `invariant` products use
_PROGRAMS = 4 * 132
_MAX_SPLITS = 16
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shares:
    """How the inputs are divided among programs: a function of the weight's shape alone."""

    splits: int
    tiles: int  # input tiles of a split; the last may have fewer

    @staticmethod
    def of(row_tiles: int, input_tiles: int) -> Shares:
        wanted = min(_MAX_SPLITS, -(-_PROGRAMS // max(1, row_tiles)), max(1, input_tiles // 2))
        tiles = max(1, -(-input_tiles // wanted))
        return Shares(max(1, -(-input_tiles // tiles)), tiles)


@dataclass(frozen=True)
class TileShape:
    """Rows of the tile kernel's tile, and stages of its pipeline."""

    rows: int
    stages: int

    @staticmethod
    def of(bits: int, rows: int, room: int) -> TileShape:
        """The largest of at most `rows` whose pipeline fits into `room` bytes of shared memory, of three stages or, up to 64
        rows, of two: 128 rows of int4 fit into the registers of Hopper alone. A row's bits do not depend on the stages, and on
        the tile as WordLinear says. Raises ValueError where none of 16 rows fits."""
        while rows >= 16:
            for stages in (3, 2) if rows <= 64 else (3,):
                if TileShape(rows, stages).shared_bound(bits) <= room:
                    return TileShape(rows, stages)
            rows //= 2
        raise ValueError(f"weights of {bits} bits: tiles of 16 rows do not fit into {room} bytes of shared memory")

    def shared_bound(self, bits: int) -> int:
        """Bytes that the compiler takes: of each stage all planes' activations, of each but the last words, and int4's scales."""
        activations = 32 // bits * 32 * self.rows * 2
        words = TILE_ROWS * TILE_WORDS * 4 * (2 if bits == 4 else 1)
        return self.stages * activations + (self.stages - 1) * words


class WordProduct:
    """x [M, K] @ weight.T (+ bias) by one of the two kernels. One stream at a time: launches share counters of arrival."""

    def __init__(self, weight: WeightWords, bias: Tensor | None) -> None:
        """bias [N]. Raises ValueError for another shape."""
        if bias is not None and bias.shape != (weight.num_outputs,):
            raise ValueError(f"bias: shape {tuple(bias.shape)}, not ({weight.num_outputs},)")
        self.weight, self.bias = weight, bias
        self.shares = Shares.of(weight.num_row_tiles, weight.num_tiles)
        slots = weight.num_row_tiles * (TILE_ROWS_MAX // INVARIANT_BLOCK)
        self._arrivals = torch.zeros(slots, dtype=torch.int32, device=weight.words.device)

    def vector(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, K], M <= 8. Same bits for a row whatever rows are beside it, as long as M rounds up to the same power of two."""
        rows = triton.next_power_of_2(max(1, x.shape[0]))
        return self._launch(vector_kernel, x, out, 1, ROWS=rows)

    def tile(self, x: Tensor, out: Tensor | None = None, block: int | None = None) -> Tensor:
        """x [M, K] float16 or bfloat16, M <= 128; `block` rows a tile (by default M, rounded up to a power of two,
        16 at least)."""
        if x.dtype not in HALVES:
            raise ValueError(f"x: dtype {x.dtype}; the tensor cores take float16 or bfloat16")
        block = block or max(16, triton.next_power_of_2(x.shape[0]))
        shape = TileShape.of(self.weight.bits, block, shared_bytes(x.device))
        m_tiles = triton.cdiv(x.shape[0], shape.rows)
        return self._launch(tile_kernel, x, out, m_tiles, BLOCK_M=shape.rows, num_stages=shape.stages)

    def _launch(self, kernel: Any, x: Tensor, out: Tensor | None, m_tiles: int, **block: int) -> Tensor:
        weight, shares = self.weight, self.shares
        num_rows = _check(x, weight)
        out = x.new_empty((num_rows, weight.num_outputs)) if out is None else _checked_out(out, x, weight)
        if num_rows == 0:
            return out
        padded = weight.num_row_tiles * TILE_ROWS
        partials = x.new_empty((shares.splits if shares.splits > 1 else 0, num_rows, padded), dtype=torch.float32)
        bias = out if self.bias is None else self.bias
        kernel[(weight.num_row_tiles, shares.splits, m_tiles)](
            x, weight.words, weight.scales, bias, out, partials, self._arrivals,
            num_rows, weight.num_outputs, weight.num_inputs, weight.num_tiles, x.stride(0), out.stride(0),
            BITS=weight.bits, SPAN=weight.span, FP8=weight.encoding == "fp8",
            SPLITS=shares.splits, TILES=shares.tiles, HAS_BIAS=self.bias is not None, num_warps=4, **block,
        )  # fmt: skip
        return out


def expanded(weight: WeightWords, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, each weight computed in float32 and rounded once; dtype uint8: the codes of an 8-bit weight."""
    out = torch.empty((weight.num_outputs, weight.num_inputs), dtype=dtype, device=weight.words.device)
    is_raw = dtype == torch.uint8
    if is_raw and weight.bits != 8:
        raise ValueError(f"dtype: uint8 is for weights of 8 bits, not {weight.encoding}")
    expand_kernel[(weight.num_row_tiles, weight.num_tiles)](
        weight.words, weight.scales, out, weight.num_outputs, weight.num_inputs, weight.num_tiles,
        BITS=weight.bits, SPAN=weight.span, FP8=weight.encoding == "fp8", RAW=is_raw, num_warps=4,
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: WeightWords) -> int:
    """The number of rows. Raises ValueError for what the kernels cannot read."""
    if x.dim() != 2 or x.shape[1] != weight.num_inputs or x.stride(1) != 1:
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, {weight.num_inputs}] with contiguous rows")
    if x.shape[0] > TILE_ROWS_MAX:
        raise ValueError(f"x: {x.shape[0]} rows; a launch takes {TILE_ROWS_MAX}")
    return x.shape[0]


def _checked_out(out: Tensor, x: Tensor, weight: WeightWords) -> Tensor:
    if out.shape != (x.shape[0], weight.num_outputs) or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"out: shape {tuple(out.shape)} of {out.dtype}, not {(x.shape[0], weight.num_outputs)} of {x.dtype}")
    return out
