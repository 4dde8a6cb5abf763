"""Kernels that multiply by weights in words (weight_words.py has their order). Launchers: weight_product.py.

A program of both products owns 64 outputs (one row tile) and one share of the inputs, a run of input tiles:

              shares of the inputs (fixed by the weight's shape)
              +--------+--------+--------+
    64 outputs|  sum 0 |  sum 1 |  sum 2 |   each in float32 to `partials`; the program that arrives last (a counter
              +--------+--------+--------+   per 64 outputs says so) adds them in the order 0, 1, 2, ..., whoever it is

How a value leaves its word: OR-ed under the exponent of 2^23 a plane's bits are the float 2^23 + value * 2^shift, exactly; one
subtraction leaves value * 2^shift. That is two operations a weight where shift, mask and conversion from integer would be three,
the conversion at a quarter of the rate. Bits from 23 up would fall into the exponent, so the upper planes are shifted down first,
all at once. The 2^shift goes into the other factor, which is exact too.

Triton compiles a kernel once for each kind of integer it is given (1, a multiple of 16, other). M has no kinds, since it differs
from step to step; sizes of a weight have, since wide loads want to know that rows begin at multiples of 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.kernel_cache_keys import settle_keys


@triton.constexpr_function
def _shift(plane: int, bits: int) -> int:
    """By how many bits plane's values are still shifted up when `_plane` returns them."""
    return bits * (plane % (23 // bits))


@triton.constexpr_function
def _shrink(plane: int, bits: int, is_fp8: bool) -> float:
    """What makes values of what `_plane` returns."""
    return 1.0 if is_fp8 else 2.0 ** -_shift(plane, bits)


@triton.jit
def _plane(word: tl.tensor, plane: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr) -> tl.tensor:
    """The float32 values of one plane, times 2^_shift (fp8: the values)."""
    if FP8:
        # e4m3's exponent and mantissa at the place of float32's lack a factor 2^(127 - 7): subnormal numbers come out right as
        # well.
        code = word >> (8 * plane)
        return (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    shift: tl.constexpr = _shift(plane, BITS)
    down: tl.constexpr = 0 if plane < 23 // BITS else BITS * (23 // BITS)
    zero: tl.constexpr = 8388608.0 + (128 if BITS == 8 else 0) * 2.0**shift
    return (((word >> down) & (((1 << BITS) - 1) << shift)) | 0x4B000000).to(tl.float32, bitcast=True) - zero


@triton.jit
def _pair(scales: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Scale and minimum (float32) of an int4 group."""
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
    """part: this program's sums for rows m and outputs n (two index tensors that broadcast to its shape)."""
    is_row = m < M
    total = part
    last = True
    if SPLITS > 1:
        place = m.to(tl.int64) * padded_n + n
        step = M.to(tl.int64) * padded_n
        tl.store(partials + split * step + place, part, mask=is_row)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(arrivals + slot, 1, sem="acq_rel")
        last = arrived == SPLITS - 1
        if last:
            tl.store(arrivals + slot, 0)  # for the next launch
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
    ROWS: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, FP8: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """Few rows: every weight is multiplied with each of ROWS activations in float32 as it comes by; nothing is shared or waited
    for until the loop has ended. Grid (row tiles, SPLITS); TILES input tiles a split.

        words [64 outputs, 32] ---- thread: 4 neighbouring words of 4 outputs, whose activations it loads once for the four
    """
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    WORDS: tl.constexpr = 32
    PLANES: tl.constexpr = 32 // BITS
    RUN: tl.constexpr = SPAN // PLANES  # words of a span
    r = tl.arange(0, 64)
    c = tl.arange(0, WORDS)
    m = tl.arange(0, ROWS)
    first_k = (c // RUN) * SPAN + c % RUN
    total = tl.zeros([ROWS, 64, WORDS], tl.float32)
    for step in range(TILES):
        # Behind the last tile: its words once more, times activations that are masked off, for k >= K.
        tile = split * TILES + step
        base = row_tile.to(tl.int64) * num_tiles + tl.minimum(tile, num_tiles - 1)
        word = tl.load(words + (base * 64 + r[:, None]) * WORDS + c[None, :])
        sums = tl.zeros([ROWS, 64, WORDS], tl.float32)
        inputs = tl.zeros([ROWS, WORDS], tl.float32)
        for plane in tl.static_range(PLANES):
            k = tile * (WORDS * PLANES) + first_k + plane * RUN
            here = tl.load(x + m[:, None] * stride_x + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0).to(
                tl.float32
            )
            w = _plane(word, plane, BITS, FP8)
            sums += w[None, :, :] * (here * _shrink(plane, BITS, FP8))[:, None, :]
            if BITS == 4:
                inputs += here
        if BITS == 4:
            scale, minimum = _pair(scales, (base * 64 + r[:, None]) * (WORDS // RUN) + (c // RUN)[None, :])
            total += scale[None, :, :] * sums
            total += minimum[None, :, :] * inputs[:, None, :]
        else:
            total += sums
    _finish(
        tl.sum(total, axis=2), m[:, None], (row_tile * 64 + r)[None, :], scales, bias, out, partials, arrivals, row_tile, split,
        M, N, tl.num_programs(0) * 64, stride_out, SPLITS, BITS == 8, HAS_BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x: tl.tensor, words: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor, partials: tl.tensor, arrivals: tl.tensor,
    M: tl.tensor, N: tl.tensor, K: tl.tensor, num_tiles: tl.tensor, stride_x: tl.tensor, stride_out: tl.tensor,
    BLOCK_M: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, FP8: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, HAS_BIAS: tl.constexpr,
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
            w = _plane(word, plane, BITS, FP8)
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
    """One tile back to out [N, K], dequantized and rounded once to its dtype; RAW: the codes themselves (8 bits). Grid:
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
            value = _plane(word, plane, BITS, FP8) * _shrink(plane, BITS, FP8) * scale
            if BITS == 4:
                value = value + minimum
        at = out + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))


settle_keys(globals())
