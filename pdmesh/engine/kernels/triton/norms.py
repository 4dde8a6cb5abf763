"""RMSNorm, alone and fused with the residual addition before it (Zhang and Sennrich, 2019), and SiLU(gate) * up.

A program owns a row and holds it in registers:   x + residual -> new residual; its mean square; weight * (row / root mean
square). The fused form reads and writes each once, 4 times the row's bytes; apart they would take 7. A step of few rows is bound
by the launch (about 2 microseconds), one of many by memory. One row a program, so a row's bits depend on nothing beside it.

Roundings are those of pdmesh.engine.models.layers.rms_norm: the sum of x and residual to their dtype, the normalized value
before it is multiplied by the weight, and the product. Only the order in which squares are added differs: of a row of H the
result is off by H 2^-24 of itself before the last two roundings, so by one unit in the last place of float16 and bfloat16,
rarely two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, residual_out: tl.tensor, width: tl.tensor, eps:
    tl.tensor,
    stride_x: tl.tensor, stride_residual: tl.tensor, stride_out: tl.tensor, stride_residual_out: tl.tensor,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    dtype = out.dtype.element_ty
    wide = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        added = (wide + tl.load(residual + row * stride_residual + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_out + row * stride_residual_out + at, added, mask=inside)
        wide = added.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / width
    normed = (wide * (1.0 / tl.sqrt_rn(mean + eps))).to(dtype).to(tl.float32)
    scaled = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * normed
    tl.store(out + row * stride_out + at, scaled.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalize x [M, H] by weight [H] of x's dtype: float16, bfloat16 or float32. `out` may be x. Raises ValueError for
    shapes."""
    out = torch.empty_like(x) if out is None else out
    _check(x, weight, ("out", out))
    _launch(x, None, weight, eps, out, out)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, residual_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add and normalize x, residual [M, H], weight [H], all of one dtype -> (normed [M, H], x + residual [M, H]).

    `out` may be x and `residual_out` the residual: each element is read before it is written, by the same thread.
    """
    out = torch.empty_like(x) if out is None else out
    residual_out = torch.empty_like(residual) if residual_out is None else residual_out
    _check(x, weight, ("residual", residual), ("out", out), ("residual_out", residual_out))
    _launch(x, residual, weight, eps, out, residual_out)
    return out, residual_out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, residual_out: Tensor) -> None:
    num_rows, width = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    other = x if residual is None else residual
    _norm_kernel[(num_rows,)](
        x, other, weight, out, residual_out, width, eps, x.stride(0), other.stride(0), out.stride(0), residual_out.stride(0),
        ADDS=residual is not None, BLOCK=block, num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip


def _check(x: Tensor, weight: Tensor, *others: tuple[str, Tensor]) -> None:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, H] with contiguous rows")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype:
        raise ValueError(f"weight: shape {tuple(weight.shape)} of {weight.dtype}, not ({x.shape[1]},) of {x.dtype}")
    for name, tensor in others:
        if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.stride(1) != 1:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)} of {tensor.dtype}, not {tuple(x.shape)} of {x.dtype} like x")


# SiLU(gate) * up over the product of gate and up in one piece (Shazeer, GLU Variants, 2020)
#
#     gate_up [M, 2 I]:   | gate: I | up: I |   ->   out [M, I];  a program owns a piece of one row
#
# Three times the output's bytes go through memory, which is the minimum. Elementwise: no number depends on its place.
# Roundings are those of pdmesh.engine.models.layers (silu, GatedMLP): silu in float32, rounded to the dtype, times up, rounded.
# Exponentials differ by a few units in the last place of float32, so the result by one of the dtype's.


_BLOCK = 1024  # 8 elements, 16 bytes, a thread


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, stride_in: tl.tensor, stride_out: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride_in + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_in + width + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    tl.store(out + row * stride_out + at, (opened * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply gate_up [M, 2 I] float16, bfloat16 or float32 -> [M, I] of its dtype. Raises ValueError for shapes."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up: shape {tuple(gate_up.shape)}, strides {gate_up.stride()}; give [M, 2 I] with contiguous rows")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, width)) if out is None else out
    if out.shape != (num_rows, width) or out.dtype != gate_up.dtype or out.stride(1) != 1:
        raise ValueError(f"out: shape {tuple(out.shape)} of {out.dtype}, not {(num_rows, width)} of {gate_up.dtype}")
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _silu_mul_kernel[grid](gate_up, out, width, gate_up.stride(0), out.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out
