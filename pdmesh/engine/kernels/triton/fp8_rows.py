# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Activations rounded to e4m3, with a scale for each row: what `scaled_product` (linear_fp8.py) multiplies.

A program owns a row and walks it twice, for its largest magnitude and to divide and round: the row is read from memory once (the
second time it is in the cache, 28 KB for 14336 inputs) and its codes are written once, 3 bytes an activation of 16 bits. Torch's
operators would take five passes with float32 between them, some 40 bytes. The width is no constant: one kernel serves all maps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.kernel_cache_keys import settle_keys
from pdmesh.engine.kernels.triton.kv_kernels import FLOAT8_MAX, FLOAT8_MIN_NORMAL, FLOAT8_SUBNORMAL

_BLOCK = 2048
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _code_of(x):
    """Bits of the e4m3 nearest to x, ties to even, saturated; -0.0 stays what it is. Rounded here, as the interpreter's cast
    rounds otherwise."""
    size = tl.minimum(tl.abs(x), FLOAT8_MAX)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (size + FLOAT8_SUBNORMAL) - FLOAT8_SUBNORMAL
    code = tl.where(size < FLOAT8_MIN_NORMAL, small, normal).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)


@triton.jit
def round_rows_kernel(x, codes, scales, width, stride_x, stride_codes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest, is_nan = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, width, BLOCK):
        value = tl.load(x + row * stride_x + first + at, mask=first + at < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        is_nan |= (value != value).to(tl.int32)  # a maximum may pass over it
    most = tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), tl.max(largest, axis=0))
    scale = tl.div_rn(most, FLOAT8_MAX)
    scale = tl.where(scale < _SMALLEST_NORMAL, _SMALLEST_NORMAL, scale)  # a subnormal one would have few bits, or none
    scale = tl.where(most == 0.0, 1.0, scale)
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        present = first + at < width
        value = tl.load(x + row * stride_x + first + at, mask=present, other=0.0).to(tl.float32)
        tl.store(codes + row * stride_codes + first + at, _code_of(tl.div_rn(value, scale)), mask=present)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] of any floating dtype -> float8_e4m3fn [M, K] and a scale for each row, [M] float32: the bits of
    pdmesh.engine.loader.quantize.rounded_to_e4m3. Of a row with infinity or NaN the scale is such, and the codes are anything.

    Raises ValueError for rows that are not contiguous.
    """
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, K] with contiguous rows")
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], device=x.device)
    if len(x):
        round_rows_kernel[(len(x),)](
            x, codes, scales, x.shape[1], x.stride(0), codes.stride(0), BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


settle_keys(globals())
