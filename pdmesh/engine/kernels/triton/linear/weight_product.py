"""Products with weights in words: the kernels, which one for how many rows, in which shares, and the launch.

Limits on an H200 (132 multiprocessors, 4.3 TB/s copied, 790 TFLOP/s measured in bfloat16). A product of M rows with [N, K] reads
N K bits / 8 bytes of weights (int4: and 4 bytes for each 32 or 64 of them) and M (N + K) activations, and does 2 M N K
operations. A multiprocessor gets some 18 bytes a clock: 18 int8 or 36 int4 weights. A clock also has 128 operations, so that a
weight may cost three of them, and 128 bytes from shared memory, of which a warp reads its activations again for each 16 or 32
outputs. Hence tensor cores for a single row, too: weights that are converted two at a time (weight_words.py) cost 1 to 2.5
operations, and 128 outputs a program make four bytes of activations for one of weights bearable.

Measured alone (H200), the four maps of a layer of 8B, us; int4 has groups of 32:

| rows | int4 | int8 | fp8 |
| --- | --- | --- | --- |
| 1 | 51 | 71 or more | 66 |
| 4 | 81 | - | - |
| 32 | 92 | 87 | 86 |
| limit | 33 | 51 | 51 |

For one row of int4 the groups of a chunk are the columns of the activations' tile, each with zeros where another group is: one
product then gives each group's sum by itself, to be scaled. Up to 8 rows each group is a product; more rows have as many sums to
be scaled as weights, which are scaled instead, and rounded.

Fixed configurations, by shape only (an autotuner would change the split, and with it the bits, from one start to the next): as
many shares of the inputs as make some three or six programs a multiprocessor, if the inputs can be divided so. Only stages,
and rows of the widest tiles, follow from the device: as many as fit into its shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import behind_last, overlap, settle_keys
from pdmesh.engine.kernels.triton.linear.weight_words import (
    CHUNK_INPUTS,
    PROGRAM_ROWS,
    TILE_ROWS,
    WeightWords,
    byte_values,
    excess,
    exponents,
    group_words,
    in_order,
    int4_values,
    is_bfloat16,
    lacking,
    numbers,
    scale_and_minimum,
)
from pdmesh.engine.kernels.triton.norms import gated
from pdmesh.engine.kernels.triton.tiles import shared_bytes

# Kernels that multiply by weights in words
#
# A program owns 128 outputs (two row tiles) and one share of the inputs, a run of chunks:
#
#               shares of the inputs (fixed by the weight's shape)
#               +--------+--------+--------+
#    128 outputs|  sum 0 |  sum 1 |  sum 2 |   each in float32 to `partials`; the program that arrives last (a counter
#               +--------+--------+--------+   per 128 outputs says so) adds them in the order 0, 1, 2, ..., whichever it is
#
# Triton compiles a kernel once for each kind of integer it is given (1, a multiple of 16, other). M has no kinds, since it
# differs from step to step; sizes of a weight have, since wide loads want to know that rows begin at multiples of 16 bytes.

OUTPUTS = tl.constexpr(PROGRAM_ROWS)
_HALF_WAY = tl.constexpr(2.0**60)  # of what fp8's values lack in bfloat16: so much is put right before, the rest at the end


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x: tl.tensor, words: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor, partials: tl.tensor, arrivals: tl.tensor,
    M: tl.tensor, N: tl.tensor, K: tl.tensor, num_tiles: tl.tensor, stride_x: tl.tensor, stride_out: tl.tensor,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (outputs / 128, SPLITS, M / BLOCK_M). A chunk has CHUNK inputs, in groups of GROUP (int4), a share CHUNKS chunks.

    AHEAD: its first words come while the kernels before this one still run. EVEN: no share ends behind the inputs. BLOCK_M 1: one
    row, of int4. KIND: of a gated MLP; a program's second 64 outputs are then the up's of its first ones, and `out` has what
    `gated` makes of both."""
    ONE: tl.constexpr = BLOCK_M == 1
    COLUMNS: tl.constexpr = 8 if ONE else BLOCK_M
    GROUPS: tl.constexpr = CHUNK // GROUP
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, COLUMNS)
    first, last = tl.program_id(1) * CHUNKS, num_tiles // (CHUNK // (64 if FORMAT == "int4" else 32)) - 1
    n, from_tile, apart = _outputs_of(N, num_tiles, KIND != "")
    exponent = exponents(M, x.dtype.element_ty)
    total = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    if AHEAD:
        begin = first if EVEN else tl.minimum(first, last)
        head = _words_of(words, from_tile, apart, begin, FORMAT, CHUNK)
        head_pair = scales
        if FORMAT == "int4":
            head_pair = _pairs_of(scales, from_tile, apart, begin * GROUPS, GROUP, GROUPS, COLUMNS)
    behind_last(OVERLAPS)
    if AHEAD:
        total = _added(total, head, head_pair, x, row, first, exponent, M, K, stride_x, FORMAT, GROUP, CHUNK, ONE, EVEN, WIDE)
    for chunk in range(1 if AHEAD else 0, CHUNKS):
        at = first + chunk
        here = at if EVEN else tl.minimum(at, last)  # behind the last chunk: its words, times activations that are masked off
        if FORMAT == "int4" and BLOCK_M == 8:
            for group in tl.static_range(GROUPS):  # each has scales of its own
                word = _group_of(words, from_tile, apart, here * GROUPS + group, GROUP)
                pair = _pairs_of(scales, from_tile, apart, here * GROUPS + group, GROUP, 1, 1)
                k = at * GROUPS + group
                total = _added(total, word, pair, x, row, k, exponent, M, K, stride_x, FORMAT, GROUP, GROUP, ONE, EVEN, WIDE)
        else:
            word = _words_of(words, from_tile, apart, here, FORMAT, CHUNK)
            pair = scales
            if FORMAT == "int4":
                pair = _pairs_of(scales, from_tile, apart, here * GROUPS, GROUP, GROUPS, COLUMNS if ONE else GROUPS)
            total = _added(total, word, pair, x, row, at, exponent, M, K, stride_x, FORMAT, GROUP, CHUNK, ONE, EVEN, WIDE)
    if ONE:
        _finish(
            tl.sum(total, axis=1), n * 0, n, scales, bias, out, partials, arrivals, M, N, stride_out, SPLITS, FORMAT, HAS_BIAS,
            KIND,
        )  # fmt: skip
    else:
        _finish(
            total, row[None, :], n[:, None], scales, bias, out, partials, arrivals, M, N, stride_out, SPLITS, FORMAT, HAS_BIAS,
            KIND,
        )  # fmt: skip


@triton.jit
def _outputs_of(N: tl.tensor, num_tiles: tl.tensor, GATED: tl.constexpr) -> tl.tensor:
    """Return a program's outputs [128], its first tile, and how many tiles further its second row tile begins."""
    r = tl.arange(0, OUTPUTS)
    program = tl.program_id(0)
    if GATED:
        n, from_tile, apart = program * 64 + r % 64 + r // 64 * (N // 2), program.to(tl.int64) * num_tiles, tl.num_programs(0)
    else:
        n, from_tile, apart = program * OUTPUTS + r, program.to(tl.int64) * 2 * num_tiles, program * 0 + 1
    return n, from_tile, apart * num_tiles


@triton.jit
def _words_of(
    words: tl.tensor, from_tile: tl.tensor, apart: tl.tensor, chunk: tl.tensor, FORMAT: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return a chunk's [2, tiles, 512]."""
    TILES: tl.constexpr = CHUNK // (64 if FORMAT == "int4" else 32)
    tiles = (chunk * TILES + tl.arange(0, TILES))[None, :, None] + tl.arange(0, 2)[:, None, None] * apart
    return tl.load(words + from_tile * 512 + tiles * 512 + tl.arange(0, 512)[None, None, :])


@triton.jit
def _group_of(
    words: tl.tensor, from_tile: tl.tensor, apart: tl.tensor, group: tl.tensor, GROUP: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return a group's words of int4, [2, 1, 512 or 256]."""
    at = group_words(group, GROUP)
    return tl.load(words + from_tile * 512 + tl.arange(0, 2)[:, None, None] * (apart * 512) + at[None, None, :])


@triton.jit
def _pairs_of(
    scales: tl.tensor, from_tile: tl.tensor, apart: tl.tensor, group: tl.tensor,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return int4's scales and minimums of GROUPS groups [128, COLUMNS]."""
    r, column = tl.arange(0, OUTPUTS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = scales + ((from_tile + r // 64 * apart) * (64 // GROUP) + group) * 64 + r % 64
    return tl.load(at + column * 64, mask=column + 0 * r < GROUPS, other=0)


@triton.jit
def _added(
    total: tl.tensor, word: tl.tensor, pair: tl.tensor, x: tl.tensor, row: tl.tensor, chunk: tl.tensor, exponent: tl.tensor,
    M: tl.tensor, K: tl.tensor, stride_x: tl.tensor, FORMAT: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    ONE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return `total` with the products of CHUNK inputs."""
    TILES: tl.constexpr = word.shape[1]
    dtype = x.dtype.element_ty
    at = tl.arange(0, CHUNK)
    k = chunk * CHUNK + at
    if ONE:
        column = tl.arange(0, total.shape[1])
        mask = (at // GROUP)[:, None] == column[None, :]
        from_x = x + k[:, None] + 0 * column[None, :]
    else:
        mask = (row < M)[None, :]
        from_x = x + row.to(tl.int64)[None, :] * stride_x + k[:, None]
    if not EVEN:
        mask = mask & (k < K)[:, None]
    here = in_order(tl.load(from_x, mask=mask, other=0.0), WIDE)
    if FORMAT == "int4" and total.shape[1] > 8:
        scale, minimum = scale_and_minimum(pair)
        weight = int4_values(word, exponent, dtype, TILES, 2, WIDE).to(tl.float32).reshape(OUTPUTS, CHUNK // GROUP, GROUP)
        weight = tl.fma(weight, scale[:, :, None], (minimum - excess(dtype) * scale)[:, :, None])
        total = tl.dot(weight.reshape(OUTPUTS, CHUNK).to(dtype), here, total)
    elif FORMAT == "int4":
        scale, minimum = scale_and_minimum(pair)
        sums = tl.dot(int4_values(word, exponent, dtype, TILES, 2, WIDE), here)
        inputs = tl.dot(_ones(word, dtype, TILES, WIDE), here)  # sums of activations, where the others lie
        total += scale * sums + (minimum - excess(dtype) * scale) * inputs
    else:
        if FORMAT == "fp8" and is_bfloat16(dtype):
            here = (here.to(tl.float32) * _HALF_WAY).to(dtype)
        total = tl.dot(byte_values(word, exponent, dtype, FORMAT == "fp8", TILES, 2, WIDE), here, total)
    return total


@triton.jit
def _ones(word: tl.tensor, dtype: tl.constexpr, TILES: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Return ones in the place of weights: made like these, they share the activations that are in registers."""
    one = (word & 0) | (0x3F803F80 if is_bfloat16(dtype) else 0x64016401)
    return int4_values(word & 0, one, dtype, TILES, 2, WIDE)


@triton.jit
def _finish(
    part: tl.tensor, m: tl.tensor, n: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor, partials: tl.tensor,
    arrivals: tl.tensor, M: tl.tensor, N: tl.tensor, stride_out: tl.tensor, SPLITS: tl.constexpr, FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Add up `part`, this program's sums for rows m and outputs n (two index tensors that broadcast to its shape)."""
    is_row = (m < M) & (n >= 0)
    total = part
    last = True
    if SPLITS > 1:
        padded_n = tl.num_programs(0) * OUTPUTS
        place = m.to(tl.int64) * padded_n + n
        step = M.to(tl.int64) * padded_n
        tl.store(partials + tl.program_id(1) * step + place, part, mask=is_row)
        tl.debug_barrier()  # all threads have stored before one of them reports it
        slot = arrivals + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        last = tl.atomic_add(slot, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(slot, 0)  # reset for the next launch
            total = tl.zeros_like(part)
            for other in range(SPLITS):
                total += tl.load(partials + other * step + place, mask=is_row, other=0.0, cache_modifier=".cg")
    if last:
        if FORMAT != "int4":
            total = total * tl.load(scales + n, mask=n < N, other=0.0)
        if FORMAT == "fp8":
            half: tl.constexpr = _HALF_WAY if is_bfloat16(out.dtype.element_ty) else 1.0
            total = total * (lacking(out.dtype.element_ty) / half)
        if HAS_BIAS:
            total = total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if KIND != "":
            _store_gated(total, m, out, M, N, stride_out, KIND)
        else:
            tl.store(out + m.to(tl.int64) * stride_out + n, total.to(out.dtype.element_ty), mask=is_row & (n < N))


@triton.jit
def _store_gated(
    total: tl.tensor, m: tl.tensor, out: tl.tensor, M: tl.tensor, N: tl.tensor, stride_out: tl.tensor, KIND: tl.constexpr
) -> None:  # fmt: skip
    """total: [128] or [128, rows], of gate and below it of up."""
    dtype = out.dtype.element_ty
    n = tl.program_id(0) * 64 + tl.arange(0, 64)
    rounded = total.to(dtype).to(tl.float32)
    if len(total.shape) == 1:
        gate, up = tl.split(tl.permute(rounded.reshape(2, 64), (1, 0)))
        tl.store(out + n, gated(gate, up, 0.0, dtype, KIND), mask=n < N // 2)
    else:
        gate, up = tl.split(tl.permute(rounded.reshape(2, 64, total.shape[1]), (1, 2, 0)))
        at = out + m.to(tl.int64) * stride_out + n[:, None]
        tl.store(at, gated(gate, up, 0.0, dtype, KIND), mask=(m < M) & (n < N // 2)[:, None])


@triton.jit
def expand_kernel(
    words: tl.tensor, scales: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.tensor, num_tiles: tl.tensor,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, RAW: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (row tiles, groups of int4 or chunks of 128 inputs). RAW: fp8's codes, without scales."""
    row_tile, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = row_tile * 64 + tl.arange(0, 64)
    if FORMAT == "int4":
        k = part * GROUP + tl.arange(0, GROUP)
        word = tl.load(words + row_tile * num_tiles * 512 + group_words(part, GROUP)[None, None, :])
        pair = tl.load(scales + (row_tile * num_tiles * (64 // GROUP) + part) * 64 + tl.arange(0, 64))
        scale, minimum = scale_and_minimum(pair)
        value = numbers(word, FORMAT, 1, 1, False) * scale[:, None] + minimum[:, None]
    else:
        k = part * 128 + tl.arange(0, 128)
        tiles = row_tile * num_tiles + part * 4 + tl.arange(0, 4)
        word = tl.load(words + tiles[None, :, None] * 512 + tl.arange(0, 512)[None, None, :])
        if RAW:
            bits = byte_values(word, 0, tl.bfloat16, True, 4, 1, False).to(tl.int16, bitcast=True)
            value = ((bits >> 8) & 0x80) | ((bits >> 4) & 0x7F)
        else:
            value = numbers(word, FORMAT, 4, 1, False) * tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    mask = (n < N)[:, None] & (k < K)[None, :]
    tl.store(out + n[:, None] * K + k[None, :], value.to(out.dtype.element_ty), mask=mask)


settle_keys(globals())


NARROW_ROWS = 8  # up to so many rows take the tensor cores' narrowest tile
PRODUCT_ROWS_MAX = 128  # up to so many take the kernel; above, expand and torch.mm
INVARIANT_BLOCK = 16  # rows of the one tile that `invariant` products use
_MULTIPROCESSORS = 132
_MAX_SPLITS = 28
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ProductShape:
    """Describe a launch: a function of the format, the number of rows and the shared memory, which limits stages and the
    rows of the widest tiles."""

    rows: int  # of a tile; 1 for one row of int4
    chunk: int  # inputs of a chunk
    stages: int
    warps: int
    ahead: bool  # a share's first words come early
    programs: int  # as many are wanted

    @staticmethod
    def of(bits: int, num_rows: int, room: int) -> ProductShape:
        """Return the shape for `num_rows` of at most PRODUCT_ROWS_MAX, or the widest one that fits into `room` bytes of shared
        memory. Raises ValueError where the narrowest does not."""
        if num_rows <= NARROW_ROWS:
            return _narrow(bits, num_rows, room)
        rows = min(max(16, triton.next_power_of_2(num_rows)), PRODUCT_ROWS_MAX)
        while rows >= 16:
            for stages in (3, 2) if bits == 4 else (4, 3, 2):
                shape = ProductShape(rows, 128, stages, 4 if bits == 4 and rows <= 32 else 8, False, 2 * _MULTIPROCESSORS)
                if shape.shared_bound(bits) <= room:
                    return shape
            rows //= 2
        raise ValueError(f"weights of {bits} bits: tiles of 16 rows do not fit into {room} bytes of shared memory")

    def shared_bound(self, bits: int) -> int:
        """Return the bytes that the compiler takes at most: each stage's words, scales and activations."""
        scales = PROGRAM_ROWS * 4 * (self.chunk // 32) if bits == 4 else 0
        words, activations = PROGRAM_ROWS * self.chunk * bits // 8, self.chunk * max(8, self.rows) * 2
        return (self.stages - (1 if self.ahead else 0)) * (words + scales + activations) + activations + scales


def _narrow(bits: int, num_rows: int, room: int) -> ProductShape:
    if bits == 4 and num_rows == 1:
        shapes = [ProductShape(1, CHUNK_INPUTS, stages, 4, True, 448) for stages in (3, 2, 1)]
    elif bits == 4:
        shapes = [ProductShape(NARROW_ROWS, 64, stages, 4, False, 1600) for stages in (4, 3, 2, 1)]
    else:
        shapes = [ProductShape(NARROW_ROWS, CHUNK_INPUTS, stages, 4, True, 896) for stages in (2, 1)]
    for shape in shapes:
        if shape.shared_bound(bits) <= room:
            return shape
    raise ValueError(f"weights of {bits} bits: tiles of {NARROW_ROWS} rows do not fit into {room} bytes of shared memory")


@dataclass(frozen=True)
class Shares:
    """Describe how the inputs are divided among programs: a function of the weight's shape and the product's alone."""

    splits: int
    chunks: int  # of a split; the last may have fewer

    @staticmethod
    def of(outputs: int, num_chunks: int, programs: int) -> Shares:
        """Return the shares, of equal size if that makes half as many programs as are wanted. `outputs`: programs of a share."""
        wanted = max(1, min(_MAX_SPLITS, round(programs / max(1, outputs)), num_chunks // 2))
        equal = max(splits for splits in range(1, wanted + 1) if num_chunks % splits == 0)
        chunks = -(-num_chunks // (equal if 2 * equal >= wanted else wanted))
        return Shares(-(-num_chunks // chunks), chunks)


class WordProduct:
    """Compute x [M, K] @ weight.T (+ bias). One stream at a time: launches share arrival counters."""

    def __init__(self, weight: WeightWords, bias: Tensor | None) -> None:
        """Prepare the product. bias [N]. Raises ValueError for another shape."""
        if bias is not None and bias.shape != (weight.num_outputs,):
            raise ValueError(f"bias: shape {tuple(bias.shape)}, not ({weight.num_outputs},)")
        self.weight, self.bias = weight, bias
        slots = self._outputs * (PRODUCT_ROWS_MAX // INVARIANT_BLOCK)
        self._arrivals = torch.zeros(slots, dtype=torch.int32, device=weight.words.device)

    @property
    def _outputs(self) -> int:
        """Return the number of programs for a share of the inputs."""
        return self.weight.num_row_tiles * TILE_ROWS // PROGRAM_ROWS

    def shares(self, shape: ProductShape) -> Shares:
        return Shares.of(self._outputs, self.weight.num_tiles * self.weight.tile_inputs // shape.chunk, shape.programs)

    @property
    def gates(self) -> bool:
        """Return whether the first half of the outputs may be a gate and the second one up: each begins with a tile."""
        return self.weight.num_outputs % PROGRAM_ROWS == 0

    def __call__(self, x: Tensor, out: Tensor | None = None, block: int | None = None, activation: str = "") -> Tensor:
        """Multiply x [M, K] float16 or bfloat16, M <= 128, in tiles of `block` rows (by default as suits M). `activation`: return
        what `gate_mul` makes of the product."""
        if x.dtype not in HALVES:
            raise ValueError(f"x: dtype {x.dtype}; the tensor cores take float16 or bfloat16")
        weight, num_rows = self.weight, _check(x, self.weight)
        if activation and not self.gates:
            raise ValueError(f"activation: gate and up of {weight.num_outputs} outputs do not both begin with a tile")
        num_outputs = weight.num_outputs // 2 if activation else weight.num_outputs
        out = x.new_empty((num_rows, num_outputs)) if out is None else _checked_out(out, x, num_outputs)
        if num_rows == 0:
            return out
        shape = ProductShape.of(weight.bits, block or num_rows, shared_bytes(x.device))
        shares = self.shares(shape)
        m_tiles = triton.cdiv(num_rows, shape.rows)
        padded = self._outputs * PROGRAM_ROWS
        partials = x.new_empty((shares.splits if shares.splits > 1 else 0, num_rows, padded), dtype=torch.float32)
        bias = out if self.bias is None else self.bias
        overlapping = overlap()
        product_kernel[(self._outputs, shares.splits, m_tiles)](
            x, weight.words, weight.scales, bias, out, partials, self._arrivals,
            num_rows, weight.num_outputs, weight.num_inputs, weight.num_tiles, x.stride(0), out.stride(0),
            FORMAT=weight.encoding, GROUP=weight.span or shape.chunk, CHUNK=shape.chunk, CHUNKS=shares.chunks,
            SPLITS=shares.splits, BLOCK_M=shape.rows, AHEAD=shape.ahead,
            EVEN=shares.splits * shares.chunks * shape.chunk == weight.num_inputs,
            WIDE=shape.rows > NARROW_ROWS and overlapping["OVERLAPS"], HAS_BIAS=self.bias is not None, KIND=activation,
            num_warps=shape.warps, num_stages=shape.stages, **overlapping,
        )  # fmt: skip
        return out


def expanded(weight: WeightWords, dtype: torch.dtype) -> Tensor:
    """Return [N, K] in `dtype`, each weight computed in float32 and rounded once; dtype uint8: the codes of an 8-bit weight."""
    out = torch.empty((weight.num_outputs, weight.num_inputs), dtype=dtype, device=weight.words.device)
    is_raw = dtype == torch.uint8
    if is_raw and weight.bits != 8:
        raise ValueError(f"dtype: uint8 is for weights of 8 bits, not {weight.encoding}")
    inputs = weight.span or 128
    expand_kernel[(weight.num_row_tiles, weight.num_tiles * weight.tile_inputs // inputs)](
        weight.words, weight.scales, out, weight.num_outputs, weight.num_inputs, weight.num_tiles,
        FORMAT=weight.encoding, GROUP=inputs, RAW=is_raw, num_warps=4,
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: WeightWords) -> int:
    """Return the number of rows. Raises ValueError for what the kernels cannot read."""
    if x.dim() != 2 or x.shape[1] != weight.num_inputs or x.stride(1) != 1:
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, {weight.num_inputs}] with contiguous rows")
    if x.shape[0] > PRODUCT_ROWS_MAX:
        raise ValueError(f"x: {x.shape[0]} rows; a launch takes {PRODUCT_ROWS_MAX}")
    return x.shape[0]


def _checked_out(out: Tensor, x: Tensor, num_outputs: int) -> Tensor:
    if out.shape != (x.shape[0], num_outputs) or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"out: shape {tuple(out.shape)} of {out.dtype}, not {(x.shape[0], num_outputs)} of {x.dtype}")
    return out
