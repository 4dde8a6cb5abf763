"""The decoder's pieces without attention: norm, linear maps, gated MLP. Pure functions of rows; no state, no cache.

Row invariance. A token's numbers must not depend on how many other tokens share its step. What was measured (torch 2.13, AVX-512,
1 to 8 threads) and what follows here:
- oneDNN with weights packed once gives each row the same bits for every M >= 2 rows (float32, bfloat16); M = 1 differs.
- MKL (torch's float32 `linear`) gives the same bits for M >= 4, with several threads only when M is also a multiple of 4 or
  M >= 12. So rows are padded to a multiple of 4 (`pad_rows`), everywhere.
- exp, rsqrt, sums and means over a row are the same for every number of rows. `F.silu` is not: its last few elements take a
  scalar path that rounds differently. So silu is written with `exp`.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 4


def pad_rows(x: Tensor) -> Tensor:
    """[M, ...] -> [M', ...] with zero rows appended, M' the next multiple of 4 (see above)."""
    missing = -x.shape[0] % ROW_MULTIPLE
    return x if missing == 0 else torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] in any dtype -> same shape and dtype; computed in float32 in transformers' order (Zhang and Sennrich, 2019)."""
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), computed in float32, bits independent of the number of rows."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


class Linear(Protocol):
    """A linear map: [M, in] -> [M, out] of the same dtype. M is a multiple of 4."""

    kind: str  # names the kernel: part of the numeric mode

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """torch's own product: float16 on CPU, bfloat16 where the processor is older than oneDNN asks for, and everything on CUDA."""

    kind = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN with the weights laid out for its kernels once, at load: for few rows several times faster than MKL, which packs
    them in every call. The packed weights replace the loaded ones, so the checkpoint's mapping can go."""

    kind = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROW_MULTIPLE)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """weight [out, in], bias [out]: the fastest map for their device and dtype."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type == "cpu" and has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _packs(weight.dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def _packs(dtype: torch.dtype) -> bool:
    """oneDNN computes in bfloat16 only on processors with AVX-512 or AVX-NE-CONVERT, and refuses on others."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class GatedMLP:
    """down(silu(gate(x)) * up(x)) (Shazeer, GLU Variants, 2020); gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)
