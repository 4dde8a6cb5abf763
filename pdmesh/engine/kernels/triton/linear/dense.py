"""Products with unquantized weights: of one row, and such whose rows have the same bits in every batch (`invariant` of
make_triton_linear).

A library chooses its kernel by the number of rows, so a row's bits change with its batch. Here the inputs are divided into splits
that follow from the weight's shape alone, and tiles are added in order:

    few rows:    a program a split:  acc_0 | acc_1 | acc_2 | acc_3    in float32 to `partials`; the last to arrive adds them
    many rows:   one program:        acc_0 + acc_1 + acc_2 + acc_3    in the same order, in registers

Rows are the right operand of the tensor cores, whose width (16 to 128) changes no sum; the left one is 64 outputs, or twice 64,
and the inputs come 64 at a time. So a row has the same bits alone, in a batch of 256 and in a prompt: a test on a GPU compares.

Measured alone (H200, bfloat16, beside cuBLAS): one row takes 0.85 to 1.08 of its time, 32 rows 0.9 to 1.12, 256 rows of a large
map 1.17. In whole decode steps it was slower than cuBLAS by a tenth, for a reason that was not found; so it is no default.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import behind_last, overlap, settle_keys
from pdmesh.engine.kernels.triton.norms import gate_mul, gated
from pdmesh.engine.kernels.triton.tiles import shared_bytes

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

FEW_ROWS = 64
"""Up to so many rows each split is a program of its own."""
_INPUTS = 64  # of a tile
_PROGRAMS = 2 * 132
_MAX_SPLITS = 8
_HALVES = (torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=["M"])
def dense_tile_kernel(
    x, weight, bias, out, partials, arrivals, M, N, K, stride_x, stride_weight, stride_out,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, TILES: tl.constexpr,
    APART: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK_N outputs and BLOCK_M rows; TILES tiles of inputs a split. APART: one split, and the last program to arrive
    adds them all, grid (outputs / BLOCK_N, SPLITS, rows / BLOCK_M); else all splits, grid (rows / BLOCK_M, outputs / BLOCK_N), so
    that programs beside each other read the same weights."""
    n_tile, m_tile = (tl.program_id(0), tl.program_id(2)) if APART else (tl.program_id(1), tl.program_id(0))
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    from_weight = weight + n.to(tl.int64)[:, None] * stride_weight + k[None, :]
    from_rows = x + m.to(tl.int64)[None, :] * stride_x + k[:, None]
    is_row, is_output = (m < M)[None, :], (n < N)[:, None]
    first_split = tl.program_id(1) if APART else 0
    behind_last(OVERLAPS)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in range(first_split, first_split + 1 if APART else SPLITS):
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for tile in range(TILES):
            first = (split * TILES + tile) * BLOCK_K
            w = tl.load(from_weight + first, mask=is_output & (first + k < K)[None, :], other=0.0)
            here = tl.load(from_rows + first, mask=is_row & (first + k < K)[:, None], other=0.0)
            acc = tl.dot(w, here, acc)
        total += acc
    last = True
    if APART and SPLITS > 1:
        width = tl.num_programs(0) * BLOCK_N
        place = m.to(tl.int64)[None, :] * width + n[:, None]
        step = M.to(tl.int64) * width
        tl.store(partials + first_split * step + place, total, mask=is_row)
        tl.debug_barrier()  # all threads have stored before one of them reports it
        slot = arrivals + m_tile * tl.num_programs(0) + n_tile
        last = tl.atomic_add(slot, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(slot, 0)  # reset for the next launch
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(SPLITS):
                total += tl.load(partials + other * step + place, mask=is_row, other=0.0, cache_modifier=".cg")
    if last:
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        at = out + m.to(tl.int64)[None, :] * stride_out + n[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=is_row & is_output)


@triton.jit
def dense_vector_kernel(
    x, weight, bias, out, N, K, stride_weight,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row. Program: BLOCK_N outputs, all their inputs in STEPS tiles. GATED: as many rows of gate and of up, N rows further,
    and what KIND makes of both."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_output = (n < N)[:, None]
    from_weight = weight + n.to(tl.int64)[:, None] * stride_weight + k[None, :]
    from_up = from_weight + N.to(tl.int64) * stride_weight
    # Weights come while the kernels before this one still run: nothing writes them.
    w = tl.load(from_weight, mask=is_output & (k < K)[None, :], other=0.0)
    if GATED:
        w_up = tl.load(from_up, mask=is_output & (k < K)[None, :], other=0.0)
    behind_last(OVERLAPS)
    total = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for step in tl.static_range(STEPS):
        first = step * BLOCK_K
        here = tl.load(x + first + k, mask=first + k < K, other=0.0)
        now = w
        if GATED:
            now_up = w_up
        if step + 1 < STEPS:
            inside = is_output & (first + BLOCK_K + k < K)[None, :]
            w = tl.load(from_weight + first + BLOCK_K, mask=inside, other=0.0)
            if GATED:
                w_up = tl.load(from_up + first + BLOCK_K, mask=inside, other=0.0)
        total += _of_eight(now, here, BLOCK_N, BLOCK_K)
        if GATED:
            total_up += _of_eight(now_up, here, BLOCK_N, BLOCK_K)
    result = _finished(total, bias, n, N, out, HAS_BIAS)
    if GATED:
        result = gated(result, _finished(total_up, bias + N, n, N, out, HAS_BIAS), 0.0, out.dtype.element_ty, KIND)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _finished(total, bias, n, N, out, HAS_BIAS: tl.constexpr):
    """Return the sums with the bias, rounded to `out`'s dtype, as float32."""
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    return result.to(out.dtype.element_ty).to(tl.float32)


@triton.jit
def _of_eight(w, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return sums of eight neighbouring products, which one thread has: [BLOCK_N, BLOCK_K] -> [BLOCK_N, BLOCK_K / 8]."""
    return tl.sum((w.to(tl.float32) * x.to(tl.float32)[None, :]).reshape(BLOCK_N, BLOCK_K // 8, 8), axis=2)


settle_keys(globals())


class TritonDense:
    """[M, K] -> [M, N] of the same dtype over weight [N, K], bias [N] (pdmesh.engine.models.layers.Linear), float16 or bfloat16.

    A row has the same bits for each M. Error of the sum of K products, u = 2^-24, d = the dtype's unit roundoff, S = sum |x| |w|:
    at most K u S + d |result|. Raises ValueError for another dtype: float32 is what the tensor cores would round.
    """

    kind = "triton-dense-tile"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dtype not in _HALVES:
            raise ValueError(f"invariant: weights of {weight.dtype}; the tensor cores take float16 or bfloat16")
        self.weight, self.bias = weight.contiguous(), bias
        num_outputs, num_inputs = weight.shape
        n_tiles, input_tiles = max(1, triton.cdiv(num_outputs, 64)), max(1, triton.cdiv(num_inputs, _INPUTS))
        wanted = max(1, min(_MAX_SPLITS, _PROGRAMS // n_tiles, input_tiles // 4))
        self._tiles = triton.cdiv(input_tiles, wanted)
        self._splits = triton.cdiv(input_tiles, self._tiles)
        self._arrivals = torch.zeros(n_tiles * (FEW_ROWS // 16), dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ValueError for another dtype, and for rows that are not contiguous."""
        if x.dtype != self.weight.dtype:
            raise ValueError(f"x: {x.dtype}, and weights of {self.weight.dtype}; give the same")
        if x.dim() != 2 or x.shape[1] != self.weight.shape[1] or x.stride(1) != 1:
            expected = self.weight.shape[1]
            raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, {expected}] with contiguous rows")
        out = x.new_empty((x.shape[0], len(self.weight)))
        if out.numel():
            self._launch(x, out)
        return out

    def _launch(self, x: Tensor, out: Tensor) -> None:
        (num_rows, _), num_outputs = x.shape, len(self.weight)
        apart = num_rows <= FEW_ROWS
        block_n, block, warps, stages = shape_of(num_rows, shared_bytes(x.device))
        n_tiles, m_tiles = triton.cdiv(num_outputs, block_n), triton.cdiv(num_rows, block)
        partials = x.new_empty((self._splits, num_rows, n_tiles * block_n) if apart else (0,), dtype=torch.float32)
        dense_tile_kernel[(n_tiles, self._splits, m_tiles) if apart else (m_tiles, n_tiles)](
            x, self.weight, out if self.bias is None else self.bias, out, partials, self._arrivals,
            num_rows, *self.weight.shape, x.stride(0), self.weight.stride(0), out.stride(0),
            BLOCK_N=block_n, BLOCK_M=block, BLOCK_K=_INPUTS, SPLITS=self._splits, TILES=self._tiles, APART=apart,
            HAS_BIAS=self.bias is not None, num_warps=warps, num_stages=stages, **overlap(),
        )  # fmt: skip


def shape_of(num_rows: int, room: int) -> tuple[int, int, int, int]:
    """Return outputs and rows of a program, warps and stages: four, or as many as fit into `room` bytes of shared memory. A row's
    bits depend on none of them."""
    outputs, rows, warps = (64, max(16, triton.next_power_of_2(num_rows)), 4) if num_rows <= FEW_ROWS else (128, 128, 8)
    return outputs, rows, warps, max(1, min(4, room // shared_bound(outputs, rows, 1)))


def shared_bound(outputs: int, rows: int, stages: int) -> int:
    """Return bytes of shared memory, no less than the compiler takes."""
    return stages * (outputs + rows) * _INPUTS * 2


_VECTOR_INPUTS = 2048  # of a tile; a program's outputs and warps were tried: 1 to 4 and 2 to 8


class VectorDense:
    """torch's product, but of one row by `dense_vector_kernel`, for weights of float16 or bfloat16. Error as TritonDense's.

    A library's kernels begin when the last one has ended. Of ours each multiprocessor has some 100 KB of weights on their way by
    then, and what gate and up become is no kernel of its own. Measured (H200, bfloat16, steps of one row, beside cuBLAS): 8B 4.43
    in place of 5.07 ms, 1B 0.94 in place of 1.17. A norm in the same kernel cost more, as every program computes it (8B 4.28 in
    place of 4.02 ms), and so did asking for a program's whole share into the L2 cache.
    """

    kind = "triton-dense-vector-torch"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Raises ValueError for weights of another dtype."""
        if weight.dtype not in _HALVES:
            raise ValueError(f"weight: {weight.dtype}; give float16 or bfloat16")
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._row(x, len(self.weight), "") if len(x) == 1 else F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return what `gate_mul` makes of the product: the weight's rows are gate and up. For one row this is one kernel."""
        return self._row(x, len(self.weight) // 2, activation) if len(x) == 1 else gate_mul(self(x), activation)

    def _row(self, x: Tensor, num_outputs: int, activation: str) -> Tensor:
        """Raises ValueError for other shapes and dtypes."""
        num_inputs = self.weight.shape[1]
        if x.shape != (1, num_inputs) or x.stride(1) != 1 or x.dtype != self.weight.dtype:
            raise ValueError(f"x: {x.dtype} {tuple(x.shape)}; give [1, {num_inputs}] of {self.weight.dtype}")
        out = x.new_empty((1, num_outputs))
        inputs, outputs = min(_VECTOR_INPUTS, triton.next_power_of_2(num_inputs)), 1 if activation else 2
        dense_vector_kernel[(triton.cdiv(num_outputs, outputs),)](
            x, self.weight, out if self.bias is None else self.bias, out, num_outputs, num_inputs, self.weight.stride(0),
            BLOCK_N=outputs, BLOCK_K=inputs, STEPS=triton.cdiv(num_inputs, inputs), GATED=bool(activation), KIND=activation,
            HAS_BIAS=self.bias is not None, num_warps=4, **overlap(),
        )  # fmt: skip
        return out
