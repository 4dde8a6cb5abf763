"""Products with weights in words: the kernels, which one for how many rows, in which shares, and the launch.

Limits on an H200 (132 multiprocessors, 4.8 TB/s, 790 TFLOP/s measured in bfloat16). A product of M rows with [N, K] reads
N K bits / 8 bytes of weights (int4: and 4 bytes a group, half a bit a weight more with groups of 64) and M (N + K) activations,
and does 2 M N K operations. Bandwidth allows 36 bytes a nanosecond and multiprocessor, at 1.8 GHz 20 bytes a clock: 20 int8 or 40
int4 weights a clock. A clock also has 128 float32 operations, 64 integer ones and 2048 fused tensor-core ones.

- `vector_kernel`, for one row: some four operations a weight, so int8 keeps up with memory and int4 reaches half of it.
- `tile_kernel`: as many, and the tensor cores' work behind them, for up to 16 rows at once. That passes the memory's time at
  some 80 rows (int8) or 40 (int4).
- Expanding costs one more write and read of 2 bytes a weight, and then runs at the library's speed.

Measured (H200, 4.2 TB/s copied, 28672 x 4096): one row 37 us (int8; vector), 45 us (tile), 58 us (cuBLAS, bfloat16).

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
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import behind_last, overlap, settle_keys
from pdmesh.engine.kernels.triton.linear.weight_words import TILE_ROWS, TILE_WORDS, WeightWords
from pdmesh.engine.kernels.triton.tiles import shared_bytes

# Kernels that multiply by weights in words (weight_words.py has their order)
#
# A program of both products owns 64 outputs (one row tile) and one share of the inputs, a run of input tiles:
#
#               shares of the inputs (fixed by the weight's shape)
#               +--------+--------+--------+
#     64 outputs|  sum 0 |  sum 1 |  sum 2 |   each in float32 to `partials`; the program that arrives last (a counter
#               +--------+--------+--------+   per 64 outputs says so) adds them in the order 0, 1, 2, ..., whichever it is
#
# How a value leaves its word: OR-ed under the exponent of 2^23 a plane's bits are the float 2^23 + value * 2^shift, exactly; one
# subtraction leaves value * 2^shift. That is two operations a weight where shift, mask and conversion from integer would be
# three, the conversion at a quarter of the rate. Bits from 23 up would fall into the exponent, so the upper planes are shifted
# down first, all at once. The 2^shift goes into the other factor, which is exact too.
#
# Triton compiles a kernel once for each kind of integer it is given (1, a multiple of 16, other). M has no kinds, since it
# differs from step to step; sizes of a weight have, since wide loads want to know that rows begin at multiples of 16 bytes.


@triton.constexpr_function
def _shift(plane: int, bits: int) -> int:
    """Return by how many bits plane's values are still shifted up when `_plane` returns them."""
    return bits * (plane % (23 // bits))


@triton.constexpr_function
def _shrink(plane: int, bits: int, is_fp8: bool) -> float:
    """Return the factor that turns what `_plane` returns into values."""
    return 1.0 if is_fp8 else 2.0 ** -_shift(plane, bits)


EXPONENT = tl.constexpr(0x4B000000)  # of 2^23


@triton.jit
def exponent_in_register(M: tl.tensor) -> tl.tensor:
    """Return EXPONENT, in a way that the compiler cannot know it: `word & mask | exponent` is one instruction with one number
    written into it, and two with two. Not for the tensor cores' operands, which it would send through shared memory."""
    return EXPONENT + tl.minimum(M, 0)


@triton.jit
def _plane(word: tl.tensor, plane: tl.constexpr, exponent: tl.tensor, BITS: tl.constexpr, FP8: tl.constexpr) -> tl.tensor:
    """Return the float32 values of one plane, times 2^_shift (fp8: the values)."""
    if FP8:
        # e4m3's exponent and mantissa at the place of float32's lack a factor 2^(127 - 7): subnormal numbers are right as
        # well.
        code = word >> (8 * plane)
        return (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    shift: tl.constexpr = _shift(plane, BITS)
    down: tl.constexpr = 0 if plane < 23 // BITS else BITS * (23 // BITS)
    zero: tl.constexpr = 8388608.0 + (128 if BITS == 8 else 0) * 2.0**shift
    return (((word >> down) & (((1 << BITS) - 1) << shift)) | exponent).to(tl.float32, bitcast=True) - zero


@triton.jit
def _pair(scales: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return scale and minimum (float32) of an int4 group."""
    pair = tl.load(scales + at)
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def _finish(
    part: tl.tensor, m: tl.tensor, n: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor, partials: tl.tensor,
    arrivals: tl.tensor, slot: tl.tensor, split: tl.tensor,
    M: tl.tensor, N: tl.tensor, padded_n: tl.tensor, stride_out: tl.tensor, SPLITS: tl.constexpr, OUTPUT_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add up `part`, this program's sums for rows m and outputs n (two index tensors that broadcast to its shape)."""
    is_row = m < M
    total = part
    last = True
    if SPLITS > 1:
        place = m.to(tl.int64) * padded_n + n
        step = M.to(tl.int64) * padded_n
        tl.store(partials + split * step + place, part, mask=is_row)
        tl.debug_barrier()  # all threads have stored before one of them reports it
        arrived = tl.atomic_add(arrivals + slot, 1, sem="acq_rel")
        last = arrived == SPLITS - 1
        if last:
            tl.store(arrivals + slot, 0)  # reset for the next launch
            total = tl.zeros_like(part)
            for other in range(SPLITS):
                total += tl.load(partials + other * step + place, mask=is_row, other=0.0, cache_modifier=".cg")
    if last:
        if OUTPUT_SCALES:
            total = total * tl.load(scales + n, mask=n < N, other=0.0)
        if HAS_BIAS:
            total = total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out + m.to(tl.int64) * stride_out + n, total.to(out.dtype.element_ty), mask=is_row & (n < N))


@triton.jit(do_not_specialize=["M"])
def vector_kernel(
    x: tl.tensor, words: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor, partials: tl.tensor, arrivals: tl.tensor,
    M: tl.tensor, N: tl.tensor, K: tl.tensor, num_tiles: tl.tensor, stride_x: tl.tensor, stride_out: tl.tensor,
    BITS: tl.constexpr, SPAN: tl.constexpr, FP8: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """One row: every weight is multiplied with its activation in float32 as it comes by; nothing is shared or waited for until
    the loop has ended. Grid (row tiles, SPLITS); TILES input tiles a split.

        words of a tile, as they lie:  | run 0: outputs 0 .. 15 | run 1: 16 .. 31 | run 2 | run 3 |     512 words each
                                       thread: 4 neighbouring words of each run, whose activations it loads once for the four

    All tensors of the loop lie alike over the threads, so none of them goes through shared memory, which would be a barrier for
    each plane; the next tile's words are asked for before this one's are used.
    """
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    WORDS: tl.constexpr = 32
    PLANES: tl.constexpr = 32 // BITS
    RUN: tl.constexpr = SPAN // PLANES  # number of words of a span
    at = tl.arange(0, 512)
    c = at % WORDS
    first_k = tl.max_contiguous(tl.multiple_of((c // RUN) * SPAN + c % RUN, 4), 4)
    thread = tl.arange(0, 128)
    group = thread // 8 * (WORDS // RUN) + thread % 8 * 4 // RUN
    exponent = exponent_in_register(M)
    first = row_tile.to(tl.int64) * num_tiles
    total_0, total_1, total_2, total_3 = _zeros(128), _zeros(128), _zeros(128), _zeros(128)
    from_here = words + (first + tl.minimum(split * TILES, num_tiles - 1)) * 2048 + at
    word_0, word_1 = tl.load(from_here), tl.load(from_here + 512)
    word_2, word_3 = tl.load(from_here + 1024), tl.load(from_here + 1536)
    behind_last(OVERLAPS)
    for step in range(TILES):
        # Behind the last tile: its words once more, times activations that are masked off, for k >= K.
        tile = split * TILES + step
        base = first + tl.minimum(tile, num_tiles - 1)
        from_next = words + (first + tl.minimum(tile + 1, num_tiles - 1)) * 2048 + at
        wanted = (at >= 0) & (step + 1 < TILES)
        next_0, next_1 = tl.load(from_next, mask=wanted, other=0), tl.load(from_next + 512, mask=wanted, other=0)
        next_2, next_3 = tl.load(from_next + 1024, mask=wanted, other=0), tl.load(from_next + 1536, mask=wanted, other=0)
        sums_0, sums_1, sums_2, sums_3, inputs = _zeros(512), _zeros(512), _zeros(512), _zeros(512), _zeros(512)
        for plane in tl.static_range(PLANES):
            k = tile * (WORDS * PLANES) + first_k + plane * RUN
            here = tl.load(x + k, mask=(k < K) & (M > 0), other=0.0).to(tl.float32)
            if BITS == 4:
                inputs += here
            here = here * _shrink(plane, BITS, FP8)
            sums_0 += _plane(word_0, plane, exponent, BITS, FP8) * here
            sums_1 += _plane(word_1, plane, exponent, BITS, FP8) * here
            sums_2 += _plane(word_2, plane, exponent, BITS, FP8) * here
            sums_3 += _plane(word_3, plane, exponent, BITS, FP8) * here
        of_inputs = _of_threads(inputs)
        groups = scales + base * (64 * (WORDS // RUN)) + group
        total_0 = _grown(total_0, sums_0, of_inputs, groups, BITS)
        total_1 = _grown(total_1, sums_1, of_inputs, groups + 16 * (WORDS // RUN), BITS)
        total_2 = _grown(total_2, sums_2, of_inputs, groups + 32 * (WORDS // RUN), BITS)
        total_3 = _grown(total_3, sums_3, of_inputs, groups + 48 * (WORDS // RUN), BITS)
        word_0, word_1, word_2, word_3 = next_0, next_1, next_2, next_3
    total = _joined(_joined(_of_run(total_0), _of_run(total_1)), _joined(_of_run(total_2), _of_run(total_3)))
    m = tl.arange(0, 1)
    _finish(
        total[None, :], m[:, None], (row_tile * 64 + tl.arange(0, 64))[None, :], scales, bias, out, partials, arrivals, row_tile,
        split, M, N, tl.num_programs(0) * 64, stride_out, SPLITS, BITS == 8, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _zeros(width: tl.constexpr) -> tl.tensor:
    return tl.zeros([width], tl.float32)


@triton.jit
def _of_threads(values: tl.tensor) -> tl.tensor:
    """Return the sums of what each thread has of a run: [512] -> [128]."""
    return tl.sum(values.reshape(128, 4), axis=1)


@triton.jit
def _grown(total: tl.tensor, sums: tl.tensor, inputs: tl.tensor, groups: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return [128] with a tile's share added."""
    if BITS == 4:
        scale, minimum = _pair(groups, 0)
        return total + scale * _of_threads(sums) + minimum * inputs
    return total + _of_threads(sums)


@triton.jit
def _of_run(total: tl.tensor) -> tl.tensor:
    """Return [16], a run's outputs: eight threads share the inputs of each."""
    return tl.sum(total.reshape(16, 8), axis=1)


@triton.jit
def _joined(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Return both [n], one behind the other: [2 n]."""
    return tl.permute(tl.join(one, other), (1, 0)).reshape(2 * one.shape[0])


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x: tl.tensor, words: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor, partials: tl.tensor, arrivals: tl.tensor,
    M: tl.tensor, N: tl.tensor, K: tl.tensor, num_tiles: tl.tensor, stride_x: tl.tensor, stride_out: tl.tensor,
    BLOCK_M: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, FP8: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """More rows: weights become x's dtype in registers and go to the tensor cores as their left operand, which may stay there;
    activations, few, go through shared memory. Grid (row tiles, SPLITS, M / BLOCK_M).

        [64 outputs, 32 words] plane p  x  [32 inputs of plane p, BLOCK_M]  +->  [64, BLOCK_M] float32

    int4 weights are rounded to x's dtype (scale * value + minimum, one rounding); int8 and fp8 values fit it exactly.
    """
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    m_tile = tl.program_id(2)
    WORDS: tl.constexpr = 32
    PLANES: tl.constexpr = 32 // BITS
    RUN: tl.constexpr = SPAN // PLANES
    r = tl.arange(0, 64)
    c = tl.arange(0, WORDS)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first_k = (c // RUN) * SPAN + c % RUN
    behind_last(OVERLAPS)
    rows = x + m.to(tl.int64)[None, :] * stride_x
    total = tl.zeros([64, BLOCK_M], tl.float32)
    for step in range(TILES):
        # Behind the last tile: its words once more, times activations that are masked off, for k >= K.
        tile = split * TILES + step
        base = row_tile.to(tl.int64) * num_tiles + tl.minimum(tile, num_tiles - 1)
        word = tl.load(words + (base * 64 + r[:, None]) * WORDS + c[None, :])
        if BITS == 4:
            scale, minimum = _pair(scales, (base * 64 + r[:, None]) * (WORDS // RUN) + (c // RUN)[None, :])
        for plane in tl.static_range(PLANES):
            k = tile * (WORDS * PLANES) + first_k + plane * RUN
            here = tl.load(rows + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
            w = _plane(word, plane, EXPONENT, BITS, FP8)
            if BITS == 4:
                w = w * (scale * _shrink(plane, BITS, FP8)) + minimum
            else:
                w = w * _shrink(plane, BITS, FP8)
            total = tl.dot(w.to(x.dtype.element_ty), here, total)
    slot = m_tile * tl.num_programs(0) + row_tile
    _finish(
        total, m[None, :], (row_tile * 64 + r)[:, None], scales, bias, out, partials, arrivals, slot, split,
        M, N, tl.num_programs(0) * 64, stride_out, SPLITS, BITS == 8, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def expand_kernel(
    words: tl.tensor, scales: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.tensor, num_tiles: tl.tensor,
    BITS: tl.constexpr, SPAN: tl.constexpr, FP8: tl.constexpr, RAW: tl.constexpr,
) -> None:  # fmt: skip
    """Write one tile to out [N, K], dequantized and rounded once to its dtype; RAW: the codes themselves (8 bits). Grid:
    row tiles, input tiles."""
    row_tile = tl.program_id(0)
    tile = tl.program_id(1)
    WORDS: tl.constexpr = 32
    PLANES: tl.constexpr = 32 // BITS
    RUN: tl.constexpr = SPAN // PLANES
    r = tl.arange(0, 64)
    c = tl.arange(0, WORDS)
    n = row_tile * 64 + r
    base = row_tile.to(tl.int64) * num_tiles + tile
    word = tl.load(words + (base * 64 + r[:, None]) * WORDS + c[None, :])
    if BITS == 4:
        scale, minimum = _pair(scales, (base * 64 + r[:, None]) * (WORDS // RUN) + (c // RUN)[None, :])
    else:
        scale = tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    for plane in tl.static_range(PLANES):
        k = tile * (WORDS * PLANES) + (c // RUN) * SPAN + c % RUN + plane * RUN
        if RAW:
            value = (word >> (BITS * plane)) & 0xFF
        else:
            value = _plane(word, plane, EXPONENT, BITS, FP8) * _shrink(plane, BITS, FP8) * scale
            if BITS == 4:
                value = value + minimum
        at = out + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))


settle_keys(globals())


VECTOR_ROWS = 1  # up to so many rows take the vector kernel
TILE_ROWS_MAX = 128  # up to so many take the tile kernel; above, expand and torch.mm
INVARIANT_BLOCK = 16  # rows of the one tile that `invariant` products use
_PROGRAMS = 4 * 132
_MAX_SPLITS = 16
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shares:
    """Describe how the inputs are divided among programs: a function of the weight's shape alone."""

    splits: int
    tiles: int  # input tiles of a split; the last may have fewer

    @staticmethod
    def of(row_tiles: int, input_tiles: int) -> Shares:
        wanted = min(_MAX_SPLITS, -(-_PROGRAMS // max(1, row_tiles)), max(1, input_tiles // 2))
        tiles = max(1, -(-input_tiles // wanted))
        return Shares(max(1, -(-input_tiles // tiles)), tiles)


@dataclass(frozen=True)
class TileShape:
    """Hold the rows of the tile kernel's tile, and the stages of its pipeline."""

    rows: int
    stages: int

    @staticmethod
    def of(bits: int, rows: int, room: int) -> TileShape:
        """Return the largest of at most `rows` whose pipeline fits into `room` bytes of shared memory, of three stages or, up to
        64 rows, of two: 128 rows of int4 fit into the registers of Hopper alone. A row's bits do not depend on the stages, and on
        the tile as WordLinear says. Raises ValueError where none of 16 rows fits."""
        while rows >= 16:
            for stages in (3, 2) if rows <= 64 else (3,):
                if TileShape(rows, stages).shared_bound(bits) <= room:
                    return TileShape(rows, stages)
            rows //= 2
        raise ValueError(f"weights of {bits} bits: tiles of 16 rows do not fit into {room} bytes of shared memory")

    def shared_bound(self, bits: int) -> int:
        """Return the bytes that the compiler takes: of each stage all planes' activations, of each but the last words, and int4's
        scales."""
        activations = 32 // bits * 32 * self.rows * 2
        words = TILE_ROWS * TILE_WORDS * 4 * (2 if bits == 4 else 1)
        return self.stages * activations + (self.stages - 1) * words


class WordProduct:
    """Compute x [M, K] @ weight.T (+ bias) by one of the two kernels. One stream at a time: launches share arrival counters."""

    def __init__(self, weight: WeightWords, bias: Tensor | None) -> None:
        """Prepare the product. bias [N]. Raises ValueError for another shape."""
        if bias is not None and bias.shape != (weight.num_outputs,):
            raise ValueError(f"bias: shape {tuple(bias.shape)}, not ({weight.num_outputs},)")
        self.weight, self.bias = weight, bias
        self.shares = Shares.of(weight.num_row_tiles, weight.num_tiles)
        slots = weight.num_row_tiles * (TILE_ROWS_MAX // INVARIANT_BLOCK)
        self._arrivals = torch.zeros(slots, dtype=torch.int32, device=weight.words.device)

    def vector(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply x [M, K], M <= 1."""
        if x.shape[0] > VECTOR_ROWS:
            raise ValueError(f"x: {x.shape[0]} rows; the vector kernel takes {VECTOR_ROWS}")
        return self._launch(vector_kernel, x, out, 1)

    def tile(self, x: Tensor, out: Tensor | None = None, block: int | None = None) -> Tensor:
        """Multiply x [M, K] float16 or bfloat16, M <= 128; `block` rows a tile (by default M, rounded up to a power of two, 16 at
        least)."""
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
            SPLITS=shares.splits, TILES=shares.tiles, HAS_BIAS=self.bias is not None, num_warps=4, **block, **overlap(),
        )  # fmt: skip
        return out


def expanded(weight: WeightWords, dtype: torch.dtype) -> Tensor:
    """Return [N, K] in `dtype`, each weight computed in float32 and rounded once; dtype uint8: the codes of an 8-bit weight."""
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
    """Return the number of rows. Raises ValueError for what the kernels cannot read."""
    if x.dim() != 2 or x.shape[1] != weight.num_inputs or x.stride(1) != 1:
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, {weight.num_inputs}] with contiguous rows")
    if x.shape[0] > TILE_ROWS_MAX:
        raise ValueError(f"x: {x.shape[0]} rows; a launch takes {TILE_ROWS_MAX}")
    return x.shape[0]


def _checked_out(out: Tensor, x: Tensor, weight: WeightWords) -> Tensor:
    if out.shape != (x.shape[0], weight.num_outputs) or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"out: shape {tuple(out.shape)} of {out.dtype}, not {(x.shape[0], weight.num_outputs)} of {x.dtype}")
    return out
