"""Weights in fp8 (e4m3: 4 bits of exponent, 3 of mantissa, no infinity), one float32 scale an output.

For few rows they are weights in words like int8's, activations as they are. For many rows Hopper multiplies fp8 by fp8 at twice
bfloat16's rate: activations are rounded to e4m3 then, with a scale for each row, by `torch._scaled_mm`. That rounding is off by
up to 1/16 of an activation, and shows: it is done only where a product is bound by the matrix units, and only if
`rounds_activations`. Elsewhere (an older GPU, sizes that are no multiples of 16, float32) weights are expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from engine.kernels.triton.linear_words import WordLinear, on_device
from engine.kernels.triton.weight_product import HALVES, expanded
from engine.kernels.triton.weight_words import WeightWords, words_of_fp8

E4M3_MAX = 448.0


@final
@dataclass(frozen=True)
class Fp8Weight:
    """w[n, k] = scales[n] * values[n, k]."""

    values: Tensor  # [N, K] float8_e4m3fn, no NaN
    scales: Tensor  # [N] float32, positive

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or self.values.dtype != torch.float8_e4m3fn or self.scales.shape != self.values.shape[:1]:
            raise ValueError(
                f"values: {tuple(self.values.shape)} of {self.values.dtype}, scales: {tuple(self.scales.shape)}; "
                "give [N, K] of float8_e4m3fn and one scale per row"
            )


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """weight [N, K] of any floating dtype: scale = largest magnitude / 448 (1 for a row of zeros), values rounded to nearest.

    Off by 1/16 of a weight at most; weights below 2^-15 of the row's largest are off by up to 2^-19 of it. Raises ValueError for
    infinity or NaN.
    """
    values, scales = _rounded(weight)
    if not scales.isfinite().all():
        raise ValueError("weights hold infinity or NaN; the checkpoint is damaged, or was saved in too narrow a dtype")
    return Fp8Weight(values, scales)


def dequantize_fp8(weight: Fp8Weight) -> Tensor:
    """[N, K] float32."""
    return weight.values.float() * weight.scales[:, None]


def fp8_linear(
    weight: Fp8Weight, bias: Tensor | None = None, invariant: bool = False, rounds_activations: bool = False
) -> WordLinear:
    """weight [N, K], bias [N] -> a map on the device of the weight's values."""
    device, bias = on_device(weight.values, bias)
    words = words_of_fp8(weight.values, weight.scales.float())
    return (
        Fp8Linear(words, bias, invariant) if rounds_activations and has_fp8_units(device) else WordLinear(words, bias, invariant)
    )


def has_fp8_units(device: torch.device) -> bool:
    """Tensor cores of e4m3: compute capability 8.9 and from 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class Fp8Linear(WordLinear):
    """WordLinear whose products of many rows round the activations."""

    @property
    def _many(self) -> str:
        return "scaledmm"

    def _product_of_many(self, x: Tensor) -> Tensor:
        if x.dtype not in HALVES or self.weight.num_inputs % 16 or self.weight.num_outputs % 16:
            return super()._product_of_many(x)
        return scaled_product(x, self.weight, self.bias)


def scaled_product(x: Tensor, weight: WeightWords, bias: Tensor | None) -> Tensor:
    """x [M, K] rounded to e4m3 by rows, times the weight's own codes, summed in float32; scales and bias at the end."""
    values, scales = _rounded(x)
    codes = expanded(weight, torch.uint8).view(torch.float8_e4m3fn)
    product = torch._scaled_mm(
        values, codes.t(), scale_a=scales[:, None], scale_b=weight.scales[None, :], out_dtype=torch.bfloat16
    )
    product = product.to(x.dtype)
    return product if bias is None else product + bias.to(x.dtype)


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] -> float8_e4m3fn [M, K] and scales [M] float32 (infinite or NaN where a row holds such)."""
    wide = matrix.float()
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    scales = (largest / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny).masked_fill(largest == 0, 1.0)
    return (wide / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales
