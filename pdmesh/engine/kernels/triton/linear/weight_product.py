"""Products with weights in words: the kernels, which one for how many rows, in which shares, and the launch.

Limits on an H200 (132 multiprocessors, 4.8 TB/s, 790 TFLOP/s measured in bfloat16). A product of M rows with [N, K] reads
N K bits / 8 bytes of weights (int4: and 4 bytes a group, half a bit a weight more with groups of 64) and M (N + K) activations,
and does 2 M N K operations. Bandwidth allows 36 bytes a nanosecond and multiprocessor, at 1.8 GHz 20 bytes a clock: 20 int8 or 40
int4 weights a clock. A clock also has 128 float32 operations, 64 integer ones and 2048 fused tensor-core ones.

- `vector_kernel`, for one row: some four operations a weight, so 8 bits keep up with memory and int4 reaches half of it.
- `tile_kernel`: as many, and the tensor cores' work behind them, for up to 16 rows at once. That passes the memory's time at
  some 80 rows (int8) or 40 (int4).
- Expanding costs one more write and read of 2 bytes a weight, and then runs at the library's speed.

Measured (H200, 4.2 TB/s copied), the four maps of a layer of 8B: one row int8 70, fp8 71, int4 65 us (limits 51, 51, 29); 32
rows int8 110, fp8 107, int4 216 us, cuBLAS in bfloat16 120.

Fixed configurations, by shape only (an autotuner would change the split, and with it the bits, from one start to the next):
64 outputs a program (4 rows a thread share each activation), 4 warps, and so many shares of the inputs that about four programs
come to each multiprocessor, of the vector kernel as many as its registers allow at once: with 8 KiB in flight each that covers
the latency of memory. Shares are 2 input tiles at least. Only the tile kernel's rows and stages follow from the device: as many
as fit into its shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import behind_last, overlap, settle_keys
from pdmesh.engine.kernels.triton.linear.weight_words import (
    EXPONENT,
    HALF_WAY,
    TILE_ROWS,
    TILE_WORDS,
    WeightWords,
    byte_planes,
    exponent_in_register,
    group_scale,
    int4_plane,
    int4_planes,
    nibble_values,
    plane_values,
    shrink,
    small_fp8,
)
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
# Triton compiles a kernel once for each kind of integer it is given (1, a multiple of 16, other). M has no kinds, since it
# differs from step to step; sizes of a weight have, since wide loads want to know that rows begin at multiples of 16 bytes.


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
    exponent = exponent_in_register(M, 0x43800000 if BITS == 4 else EXPONENT)
    exponent_high = exponent_in_register(M, 0x41800000)
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
        sums_0, sums_1, sums_2, sums_3 = _zeros(512), _zeros(512), _zeros(512), _zeros(512)
        low, high = _zeros(512), _zeros(512)  # sums of activations, of planes below and above in a pair
        for plane in tl.static_range(PLANES):
            k = tile * (WORDS * PLANES) + first_k + plane * RUN
            here = tl.load(x + k, mask=(k < K) & (M > 0), other=0.0).to(tl.float32)
            if BITS == 4:
                if plane % 2 == 0:
                    low += here
                else:
                    high += here
                sums_0 += nibble_values(word_0, plane, exponent, exponent_high) * here
                sums_1 += nibble_values(word_1, plane, exponent, exponent_high) * here
                sums_2 += nibble_values(word_2, plane, exponent, exponent_high) * here
                sums_3 += nibble_values(word_3, plane, exponent, exponent_high) * here
            elif FP8:
                here = here * HALF_WAY
                sums_0 += small_fp8(word_0, plane) * here
                sums_1 += small_fp8(word_1, plane) * here
                sums_2 += small_fp8(word_2, plane) * here
                sums_3 += small_fp8(word_3, plane) * here
            else:
                here = here * shrink(plane, BITS, FP8)
                sums_0 += plane_values(word_0, plane, exponent, BITS, FP8) * here
                sums_1 += plane_values(word_1, plane, exponent, BITS, FP8) * here
                sums_2 += plane_values(word_2, plane, exponent, BITS, FP8) * here
                sums_3 += plane_values(word_3, plane, exponent, BITS, FP8) * here
        of_low, of_high = _of_threads(low), _of_threads(high)
        of_inputs, added = of_low + of_high, 256.0 * of_low + 16.0 * of_high
        groups = scales + base * (64 * (WORDS // RUN)) + group
        total_0 = _grown(total_0, sums_0, of_inputs, added, groups, BITS)
        total_1 = _grown(total_1, sums_1, of_inputs, added, groups + 16 * (WORDS // RUN), BITS)
        total_2 = _grown(total_2, sums_2, of_inputs, added, groups + 32 * (WORDS // RUN), BITS)
        total_3 = _grown(total_3, sums_3, of_inputs, added, groups + 48 * (WORDS // RUN), BITS)
        word_0, word_1, word_2, word_3 = next_0, next_1, next_2, next_3
    total = _joined(_joined(_of_run(total_0), _of_run(total_1)), _joined(_of_run(total_2), _of_run(total_3)))
    if FP8:
        total = total * HALF_WAY
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
def _grown(
    total: tl.tensor, sums: tl.tensor, inputs: tl.tensor, added: tl.tensor, groups: tl.tensor, BITS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return [128] with a tile's share added. `added`: what the sums have too much of."""
    if BITS == 4:
        scale, minimum = group_scale(groups, 0)
        return total + scale * (_of_threads(sums) - added) + minimum * inputs
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

        [64 outputs, 32 words of P planes]  x  [32 P inputs, plane by plane, BLOCK_M]  +->  [64, BLOCK_M] float32

    All planes of a tile are one product: one after the other each would be waited for. But int4 of 16 rows comes plane by plane:
    its registers let three programs be on a multiprocessor, not two (measured: 121 in place of 155 us). int4 weights are rounded
    to x's dtype (scale * value + minimum, one rounding); int8 and fp8 values fit it exactly.
    """
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    m_tile = tl.program_id(2)
    WORDS: tl.constexpr = 32
    PLANES: tl.constexpr = 32 // BITS
    RUN: tl.constexpr = SPAN // PLANES
    APART: tl.constexpr = BITS == 4 and BLOCK_M == 16
    r = tl.arange(0, 64)
    c = tl.arange(0, WORDS)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    of_tile = tl.arange(0, WORDS * PLANES)  # inputs, plane by plane
    first_k = (of_tile % WORDS // RUN) * SPAN + of_tile % RUN + of_tile // WORDS * RUN
    first_k = tl.max_contiguous(tl.multiple_of(first_k, RUN), RUN)
    behind_last(OVERLAPS)
    rows = x + m.to(tl.int64)[None, :] * stride_x
    total = tl.zeros([64, BLOCK_M], tl.float32)
    for step in range(TILES):
        # Behind the last tile: its words once more, times activations that are masked off, for k >= K.
        tile = split * TILES + step
        base = row_tile.to(tl.int64) * num_tiles + tl.minimum(tile, num_tiles - 1)
        word = tl.load(words + (base * 64 + r[:, None]) * WORDS + c[None, :])
        if BITS == 4:
            scale, minimum = group_scale(scales, (base * 64 + r[:, None]) * (WORDS // RUN) + (c // RUN)[None, :])
        if APART:
            for plane in tl.static_range(PLANES):
                k = tile * (WORDS * PLANES) + (c // RUN) * SPAN + c % RUN + plane * RUN
                here = tl.load(rows + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
                w = int4_plane(word, plane, scale, tl.fma(scale, -16.0 if plane % 2 else -256.0, minimum), x.dtype.element_ty)
                total = tl.dot(w, here, total)
        else:
            k = tile * (WORDS * PLANES) + first_k
            here = tl.load(rows + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
            if BITS == 4:
                w = int4_planes(word, scale, minimum, x.dtype.element_ty)
            else:
                w = byte_planes(word, FP8, x.dtype.element_ty)
            total = tl.dot(w, here, total)
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
        scale, minimum = group_scale(scales, (base * 64 + r[:, None]) * (WORDS // RUN) + (c // RUN)[None, :])
    else:
        scale = tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    for plane in tl.static_range(PLANES):
        k = tile * (WORDS * PLANES) + (c // RUN) * SPAN + c % RUN + plane * RUN
        if RAW:
            value = (word >> (BITS * plane)) & 0xFF
        else:
            value = plane_values(word, plane, EXPONENT, BITS, FP8) * shrink(plane, BITS, FP8) * scale
            if BITS == 4:
                value = value + minimum
        at = out + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))


settle_keys(globals())


VECTOR_ROWS = 1  # up to so many rows take the vector kernel
TILE_ROWS_MAX = 128  # up to so many take the tile kernel; above, expand and torch.mm
INVARIANT_BLOCK = 16  # rows of the one tile that `invariant` products use
_MULTIPROCESSORS = 132
_PROGRAMS = 4 * _MULTIPROCESSORS
_RESIDENT = {4: 6, 8: 7}  # programs of the vector kernel on a multiprocessor, by bits, as their registers allow
_VECTOR_REGISTERS = {4: 80, 8: 72}
_MAX_SPLITS = 16
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shares:
    """Describe how the inputs are divided among programs: a function of the weight's shape alone."""

    splits: int
    tiles: int  # input tiles of a split; the last may have fewer

    @staticmethod
    def of(row_tiles: int, input_tiles: int, resident: int = 0) -> Shares:
        """Return the shares. `resident`: as many programs of a multiprocessor run at once, so that more may be wanted."""
        row_tiles = max(1, row_tiles)
        wanted = max(-(-_PROGRAMS // row_tiles), resident * _MULTIPROCESSORS // row_tiles)
        wanted = min(_MAX_SPLITS, wanted, max(1, input_tiles // 2))
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
        self.vector_shares = Shares.of(weight.num_row_tiles, weight.num_tiles, _RESIDENT[weight.bits])
        slots = weight.num_row_tiles * (TILE_ROWS_MAX // INVARIANT_BLOCK)
        self._arrivals = torch.zeros(slots, dtype=torch.int32, device=weight.words.device)

    def vector(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply x [M, K], M <= 1."""
        if x.shape[0] > VECTOR_ROWS:
            raise ValueError(f"x: {x.shape[0]} rows; the vector kernel takes {VECTOR_ROWS}")
        options = {"maxnreg": _VECTOR_REGISTERS[self.weight.bits]}
        return self._launch(vector_kernel, x, out, (1, self.vector_shares), options)

    def tile(self, x: Tensor, out: Tensor | None = None, block: int | None = None) -> Tensor:
        """Multiply x [M, K] float16 or bfloat16, M <= 128; `block` rows a tile (by default M, rounded up to a power of two, 16 at
        least)."""
        if x.dtype not in HALVES:
            raise ValueError(f"x: dtype {x.dtype}; the tensor cores take float16 or bfloat16")
        block = block or max(16, triton.next_power_of_2(x.shape[0]))
        shape = TileShape.of(self.weight.bits, block, shared_bytes(x.device))
        m_tiles = triton.cdiv(x.shape[0], shape.rows)
        options = {"BLOCK_M": shape.rows, "num_stages": shape.stages}
        return self._launch(tile_kernel, x, out, (m_tiles, self.shares), options)

    def _launch(self, kernel: Any, x: Tensor, out: Tensor | None, grid: tuple[int, Shares], options: dict[str, int]) -> Tensor:
        weight, (m_tiles, shares) = self.weight, grid
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
            SPLITS=shares.splits, TILES=shares.tiles, HAS_BIAS=self.bias is not None, num_warps=4, **options, **overlap(),
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
