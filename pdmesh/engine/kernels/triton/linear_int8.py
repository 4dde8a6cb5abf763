"""Weight-only int8: one float32 scale an output, applied to the finished sums."""

from __future__ import annotations

from torch import Tensor

from pdmesh.engine.kernels.triton.linear_words import WordLinear, on_device
from pdmesh.engine.kernels.triton.weight_words import words_of_int8
from pdmesh.engine.loader.quantize import Int8Weight


def int8_linear(weight: Int8Weight, bias: Tensor | None = None, invariant: bool = False) -> WordLinear:
    """weight [N, K], bias [N] -> a map on the device of the weight's values. A byte a weight; see WordLinear for the numbers."""
    device, bias = on_device(weight.values, bias)
    return WordLinear(words_of_int8(weight, device), bias, invariant)
