"""Weight-only int4: a float16 scale and minimum for each group of 32, 64 or 128 inputs of an output.

Read a weight: 4 bits, and 32 bits a group: 1, 0.5 or 0.25 bits more.
"""

from __future__ import annotations

from torch import Tensor

from pdmesh.engine.kernels.triton.linear_words import WordLinear, on_device
from pdmesh.engine.kernels.triton.weight_words import words_of_int4
from pdmesh.engine.loader.quantize import Int4Weight


def int4_linear(weight: Int4Weight, bias: Tensor | None = None, invariant: bool = False) -> WordLinear:
    """weight [N, K], bias [N] -> a map on the device of the weight's values; see WordLinear for the numbers."""
    device, bias = on_device(weight.values, bias)
    return WordLinear(words_of_int4(weight, device), bias, invariant)
