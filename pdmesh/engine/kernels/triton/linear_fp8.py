"""Weights in fp8 (e4m3: 4 bits of exponent, 3 of mantissa, no infinity), one float32 scale an output.

For few rows they are weights in words like int8's, activations as they are. For many rows Hopper multiplies fp8 by fp8 at twice
bfloat16's rate: activations are rounded to e4m3 then, with a scale for each row, by `torch._scaled_mm`. That rounding is off by
up to 1/16 of an activation, and shows: it is done only where a product is bound by the matrix units, and only if
`rounds_activations` (the flag --fp8-activations, which the numeric mode names). Elsewhere, and for sizes that are no multiples of
16 and float32, weights are expanded. A CPU has no such units, but torch computes the same there, for tests.

Error of the sum of K products then, S = sum |x| |w| with the weights that the codes stand for: at most (2^-4 + 2^-12) S, and of
activations below 2^-15 of a row's largest up to 2^-19 of that each; the units sum with 13 bits or more. Torch rounds the result
to bfloat16 whatever x is, as its products with a scale a row give nothing else: off by 2^-8 |result| for float16 too, and once
more where there is a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.fp8_rows import rounded_rows
from pdmesh.engine.kernels.triton.linear_words import WordLinear, on_device
from pdmesh.engine.kernels.triton.weight_product import HALVES, expanded
from pdmesh.engine.kernels.triton.weight_words import WeightWords, words_of_fp8
from pdmesh.engine.loader.quantize import Fp8Weight


def fp8_linear(
    weight: Fp8Weight, bias: Tensor | None = None, invariant: bool = False, rounds_activations: bool = False
) -> WordLinear:
    """weight [N, K], bias [N] -> a map on the device of the weight's values. Raises ValueError where that cannot multiply in fp8
    and `rounds_activations` asks for it."""
    device, bias = on_device(weight.values, bias)
    words = words_of_fp8(weight.values, weight.scales.float())
    if not rounds_activations:
        return WordLinear(words, bias, invariant)
    if not multiplies_fp8(device):
        raise ValueError("fp8_activations: this GPU has no units that multiply fp8 (Ada, Hopper and later have); leave it out")
    return Fp8Linear(words, bias, invariant)


def multiplies_fp8(device: torch.device) -> bool:
    """By tensor cores of e4m3, compute capability 8.9 and from 9.0 on; or on a CPU."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


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
    values, scales = rounded_rows(x)
    codes = expanded(weight, torch.uint8).view(torch.float8_e4m3fn)
    product = torch._scaled_mm(
        values, codes.t(), scale_a=scales[:, None], scale_b=weight.scales[None, :], out_dtype=torch.bfloat16
    )
    product = product.to(x.dtype)
    return product if bias is None else product.add_(bias.to(x.dtype))
