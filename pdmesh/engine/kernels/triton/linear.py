"""Which linear map serves which format of weights."""

from __future__ import annotations

from torch import Tensor

from pdmesh.engine.kernels.triton.linear_fp8 import fp8_linear
from pdmesh.engine.kernels.triton.linear_int4 import int4_linear
from pdmesh.engine.kernels.triton.linear_int8 import int8_linear
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight
from pdmesh.engine.models.layers import Linear, make_linear


def make_triton_linear(
    weight: Tensor | Int8Weight | Int4Weight | Fp8Weight,
    bias: Tensor | None = None,
    invariant: bool = False,
    *,
    rounds_activations: bool = False,
) -> Linear:
    """A map on the device of the weight. Unquantized weights take torch's product, whose bits depend on the number of rows: with
    `invariant` they raise ValueError. `rounds_activations`: of fp8 weights, see linear_fp8.py."""
    if isinstance(weight, Int8Weight):
        return int8_linear(weight, bias, invariant)
    if isinstance(weight, Int4Weight):
        return int4_linear(weight, bias, invariant)
    if isinstance(weight, Fp8Weight):
        return fp8_linear(weight, bias, invariant, rounds_activations)
    if invariant:
        raise ValueError("invariant: torch's product is not; give quantized weights, or leave it")
    return make_linear(weight, bias)
