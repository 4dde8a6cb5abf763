"""Products with weights in 8 and 4 bits against those with the dequantized ones, within the bound that WordLinear states."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.context import Context
from benchmarks.gpu.drawn import random_fp8, random_int4, random_int8
from pdmesh.engine.kernels.triton.linear.linear import make_triton_linear
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight, dequantize_fp8, dequantize_int4, dequantize_int8
from tests.gpu.checks import Check, random
from tests.gpu.compare import UNIT, over_bound

ENCODINGS = ("int8", "int4", "fp8")
ROWS = (
    4,
    32,
    300,
)  # of the vector kernel, of tiles, and more than both take; as decode has them, whose kernels are compiled then
ROUNDINGS = 3.0  # of the weight, of the result, and one for good measure


def linear_checks(context: Context) -> Iterator[tuple[str, Check]]:
    shape = context.scale.config("8B")
    sizes = ((2 * shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size))
    for encoding in ENCODINGS:
        for outputs, inputs in sizes:
            name = f"product with {encoding}, {outputs} x {inputs}"
            yield name, lambda c, e=encoding, o=outputs, i=inputs: _product(c, e, o, i)  # type: ignore[misc]


def _product(context: Context, encoding: str, outputs: int, inputs: int) -> float:
    weight, dense = _weight(context, encoding, outputs, inputs)
    linear = make_triton_linear(weight)
    return max(_over_bound(context, linear(x), x, dense) for x in _activations(context, inputs))


def _activations(context: Context, inputs: int) -> Iterator[Tensor]:
    for rows in ROWS if context.device != "cpu" else (1, 4, 9):
        yield random(context, f"x{rows}", rows, inputs)


def _weight(context: Context, encoding: str, outputs: int, inputs: int) -> tuple[Int8Weight | Int4Weight | Fp8Weight, Tensor]:
    if encoding == "int8":
        int8 = random_int8("check", outputs, inputs, 0, context.device)
        return int8, dequantize_int8(int8)
    if encoding == "int4":
        int4 = random_int4("check", outputs, inputs, 32, context.device)
        return int4, dequantize_int4(int4)
    fp8 = random_fp8("check", outputs, inputs, 0, context.device)
    return fp8, dequantize_fp8(fp8)


def _over_bound(context: Context, actual: Tensor, x: Tensor, dense: Tensor) -> float:
    """|error| <= (K u + 2 d) sum |x| |w| + d |result|."""
    exact, size = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    unit = UNIT[context.dtype]
    bound = (x.shape[1] * UNIT[torch.float32] + (ROUNDINGS - 1) * unit) * size + unit * exact.abs() + 1e-7
    return over_bound(actual, exact, bound)
