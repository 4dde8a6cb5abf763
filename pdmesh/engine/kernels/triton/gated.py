"""SiLU(gate) * up over the product of gate and up in one piece (Shazeer, GLU Variants, 2020).

    gate_up [M, 2 I]:   | gate: I | up: I |   ->   out [M, I];  a program owns a piece of one row

Three times the output's bytes go through memory, the least there is. Elementwise: no number depends on its place.
Roundings are those of pdmesh.engine.models.layers (silu, GatedMLP): silu in float32, rounded to the dtype, times up, rounded. Exponentials
differ by a few units in the last place of float32, so the result by one of the dtype's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
    """gate_up [M, 2 I] float16, bfloat16 or float32 -> [M, I] of its dtype. Raises ValueError for shapes."""
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
