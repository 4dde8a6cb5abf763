"""RMSNorm and LayerNorm, alone and fused with the residual addition before them (Zhang and Sennrich, 2019; Ba et al., 2016), and
what gated MLPs compute of gate and up.

A program owns a row and holds it in registers:   x + residual -> new residual; its mean square; weight * (row / root mean
square). The fused form reads and writes each once, 4 times the row's bytes; apart they would take 7. A step of few rows is bound
by the launch (about 2 microseconds), one of many by memory. One row a program, so a row's bits depend on nothing beside it.

Roundings are those of pdmesh.engine.models.layers.Norm: x times its factor and the sum with the residual to their dtype, the
normalized value before it is multiplied by the weight (not of a wide weight, nor in LayerNorm), and the product. Only the order
in which squares are added differs: of a row of H the result is off by H 2^-24 of itself before the last two roundings, so by one
unit in the last place of float16 and bfloat16, rarely two.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import behind_last, overlap, settle_keys
from pdmesh.engine.models.layers import Norm


@triton.jit
def _norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, residual_out: tl.tensor,
    width: tl.tensor, eps: tl.tensor, factor: tl.tensor,
    stride_x: tl.tensor, stride_residual: tl.tensor, stride_out: tl.tensor, stride_residual_out: tl.tensor,
    ADDS: tl.constexpr, HAS_FACTOR: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Program: a row. KIND: rms, wide (whose weight multiplies before the result is rounded) or layer."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    behind_last(OVERLAPS)
    dtype = out.dtype.element_ty
    wide = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        wide = (wide * factor).to(dtype).to(tl.float32)
    if ADDS:
        added = (wide + tl.load(residual + row * stride_residual + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_out + row * stride_residual_out + at, added, mask=inside)
        wide = added.to(tl.float32)
    if KIND == "layer":
        wide = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    mean = tl.sum(wide * wide, axis=0) / width
    normed = wide * (1.0 / tl.sqrt_rn(mean + eps))
    if KIND == "rms":
        normed = normed.to(dtype).to(tl.float32)
    scaled = scale * normed
    if HAS_BIAS:
        scaled = scaled + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + at, scaled.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalize x [M, H] by weight [H] of x's dtype: float16, bfloat16 or float32. `out` may be x. Raises ValueError for
    shapes."""
    return normalized(x, Norm(weight, eps), out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, residual_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add and normalize x, residual [M, H], weight [H], all of one dtype -> (normed [M, H], x + residual [M, H]).

    `out` may be x and `residual_out` the residual: each element is read before it is written, by the same thread.
    """
    return added_and_normalized(x, residual, Norm(weight, eps), out, residual_out)


def normalized(x: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
    """Normalize x [M, H] by any kind of norm; see `rms_norm`."""
    out = torch.empty_like(x) if out is None else out
    _check(x, norm.weight, ("out", out))
    _launch(x, None, norm, 1.0, out, out)
    return out


def added_and_normalized(
    x: Tensor,
    residual: Tensor,
    norm: Norm,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add `factor` times x to the residual, and normalize the sum by any kind of norm; see `add_rms_norm`."""
    out = torch.empty_like(x) if out is None else out
    residual_out = torch.empty_like(residual) if residual_out is None else residual_out
    _check(x, norm.weight, ("residual", residual), ("out", out), ("residual_out", residual_out))
    _launch(x, residual, norm, factor, out, residual_out)
    return out, residual_out


def _launch(x: Tensor, residual: Tensor | None, norm: Norm, factor: float, out: Tensor, residual_out: Tensor) -> None:
    num_rows, width = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    other, weight, bias = x if residual is None else residual, norm.weight, norm.weight if norm.bias is None else norm.bias
    _norm_kernel[(num_rows,)](
        x, other, weight, bias, out, residual_out, width, norm.eps, factor,
        x.stride(0), other.stride(0), out.stride(0), residual_out.stride(0),
        ADDS=residual is not None, HAS_FACTOR=factor != 1.0, KIND=kind_of(norm),
        HAS_BIAS=norm.bias is not None, BLOCK=block, num_warps=4 if block <= 4096 else 8, **overlap(),
    )  # fmt: skip


def kind_of(norm: Norm) -> str:
    """Return the kernels' KIND of a norm: layer, or rms, or wide for one whose weight multiplies before the result is rounded."""
    return "wide" if norm.kind == "rms" and norm.wide else norm.kind


def _check(x: Tensor, weight: Tensor, *others: tuple[str, Tensor]) -> None:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, H] with contiguous rows")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype:
        raise ValueError(f"weight: shape {tuple(weight.shape)} of {weight.dtype}, not ({x.shape[1]},) of {x.dtype}")
    for name, tensor in others:
        if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.stride(1) != 1:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)} of {tensor.dtype}, not {tuple(x.shape)} of {x.dtype} like x")


# The activation of gate, times up, over the product of both in one piece (Shazeer, GLU Variants, 2020)
#
#     gate_up [M, 2 I]:   | gate: I | up: I |   ->   out [M, I];  a program owns a piece of one row
#
# Three times the output's bytes go through memory, which is the minimum. Elementwise: no number depends on its place.
# Roundings are those of pdmesh.engine.models.layers (ACTIVATIONS, GatedMLP): the activation in float32, rounded to the dtype,
# times up, rounded. Exponentials differ by a few units in the last place of float32, so the result by one of the dtype's.


_BLOCK = 1024  # 8 elements, 16 bytes, a thread
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_TWICE_SQRT_2_OVER_PI = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_ALPHA = tl.constexpr(1.702)  # GPT-OSS: of the sigmoid in its activation


@triton.jit
def activated(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return an activation of x, float32 both."""
    if KIND == "silu":
        result = tl.div_rn(x, 1.0 + tl.exp(-x))
    elif KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif KIND == "gelu_tanh":  # 1 + tanh(y) is 2 / (1 + exp(-2 y))
        result = tl.div_rn(x, 1.0 + tl.exp(-_TWICE_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        result = tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "relu2")
        result = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return result


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, limit: tl.tensor, dtype: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """Return what a gated MLP gives to its last product, of that dtype: gate and up are float32, rounded to it already.
    swiglu_oai (GPT-OSS) clamps both to `limit`."""
    if KIND == "swiglu_oai":
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1.0) * tl.div_rn(gate, 1.0 + tl.exp(-_ALPHA * gate))
    else:
        result = activated(gate, KIND).to(dtype).to(tl.float32) * up
    return result.to(dtype)


@triton.jit
def _gate_kernel(
    gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, stride_in: tl.tensor, stride_out: tl.tensor, KIND: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    behind_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * stride_in + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_in + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + at, gated(gate, up, 0.0, out.dtype.element_ty, KIND), mask=inside)


@triton.jit
def _activation_kernel(
    x: tl.tensor, out: tl.tensor, width: tl.tensor, stride_in: tl.tensor, stride_out: tl.tensor, KIND: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    behind_last(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    value = activated(tl.load(x + row * stride_in + at, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(out + row * stride_out + at, value.to(out.dtype.element_ty), mask=inside)


settle_keys(globals())


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply gate_up [M, 2 I] float16, bfloat16 or float32 -> [M, I] of its dtype. Raises ValueError for shapes."""
    return gate_mul(gate_up, "silu", out)


def gate_mul(gate_up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """Multiply an activation (pdmesh.engine.models.layers.ACTIVATIONS) of gate with up; see `silu_mul`."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up: shape {tuple(gate_up.shape)}, strides {gate_up.stride()}; give [M, 2 I] with contiguous rows")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, width)) if out is None else out
    if out.shape != (num_rows, width) or out.dtype != gate_up.dtype or out.stride(1) != 1:
        raise ValueError(f"out: shape {tuple(out.shape)} of {out.dtype}, not {(num_rows, width)} of {gate_up.dtype}")
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _gate_kernel[grid](
            gate_up, out, width, gate_up.stride(0), out.stride(0), KIND=activation, BLOCK=_BLOCK, num_warps=4, **overlap()
        )  # fmt: skip
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """Replace x [M, I], rows contiguous, by an activation of it, and return it."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, I] with contiguous rows")
    if len(x):
        grid = (len(x), triton.cdiv(x.shape[1], _BLOCK))
        _activation_kernel[grid](
            x, x, x.shape[1], x.stride(0), x.stride(0), KIND=activation, BLOCK=_BLOCK, num_warps=4, **overlap()
        )  # fmt: skip
    return x
