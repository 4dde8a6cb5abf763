"""A row's bits in every batch, of unquantized and quantized maps, and what that costs beside a library that minds the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.gpu.context import Context, turns_s
from benchmarks.harness import Figure
from pdmesh.engine.kernels.triton.linear.dense import TritonDense
from pdmesh.engine.kernels.triton.linear.linear import make_triton_linear
from pdmesh.engine.models.layers import DenseLinear, Linear
from tests.support.random_weights import random_int4, random_int8

BATCHES = (1, 4, 32, 64, 256)
EXPECTED_S = 2.5
L2_BYTES = 120 << 20
"""Twice what an H200 caches: weights are read in turn, so that each is read from memory."""


@torch.inference_mode()
def run(context: Context) -> None:
    shape = context.scale.config("8B")
    for name, outputs, inputs in (
        ("gate and up", 2 * shape.intermediate_size, shape.hidden_size),
        ("output", shape.hidden_size, shape.num_heads * shape.head_dim),
    ):
        if context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"a row's bits, {name} of 8B"):
            _bits(context, name, outputs, inputs)
            _cost(context, name, outputs, inputs)


def _bits(context: Context, name: str, outputs: int, inputs: int) -> None:
    """Rows alone against the same rows among others, over all batches."""
    weight = torch.randn((outputs, inputs), device=context.device, dtype=context.dtype) / inputs**0.5
    if context.dtype.itemsize != 2:  # the tensor cores' kernels do not take it
        return
    maps: dict[str, Linear] = {
        "unquantized": TritonDense(weight),
        "int8": make_triton_linear(random_int8("w", outputs, inputs, 0, context.device), invariant=True),
        "int4": make_triton_linear(random_int4("w", outputs, inputs, 64, context.device), invariant=True),
    }
    x = torch.randn((max(BATCHES), inputs), device=context.device, dtype=context.dtype)
    for form, linear in maps.items():
        differing = _num_differing(linear, x)
        if differing:
            context.fail(f"{name} of 8B, {form}: {differing} rows have other bits in a batch than alone")
        title = f"rows with other bits in batches of 1 to {max(BATCHES)} than alone: {form}, {name} of 8B"
        context.add(Figure(title, float(differing), "rows", "lower", goal=0.0))


def _num_differing(linear: Linear, x: Tensor) -> int:
    alone = torch.cat([linear(x[row : row + 1]) for row in range(0, len(x), max(1, len(x) // 16))])
    count = 0
    for batch in range(1, len(x) + 1):
        together = linear(x[:batch])
        own = together[:: max(1, len(x) // 16)]
        count += int((own != alone[: len(own)]).any(dim=1).sum())
    return count


def _cost(context: Context, name: str, outputs: int, inputs: int) -> None:
    if context.dtype.itemsize != 2:
        return
    num_copies = max(1, min(8, -(-L2_BYTES // (outputs * inputs * 2)) + 1)) if context.device == "cuda" else 1
    weights = [torch.randn((outputs, inputs), device=context.device, dtype=context.dtype) for _ in range(num_copies)]
    maps = [TritonDense(weight) for weight in weights]
    for batch in (*BATCHES, context.scale.prefill):
        x = torch.randn((batch, inputs), device=context.device, dtype=context.dtype)
        ours, library = _in_turn(maps, x), _in_turn([DenseLinear(weight, None) for weight in weights], x)
        seconds = turns_s({"invariant": ours, "library": library}, context.device)
        title = f"unquantized product with the same bits in every batch, {name} of 8B, {batch} rows"
        least_s = max(
            outputs * inputs * 2 / context.machine.bytes_per_s, 2 * batch * outputs * inputs / context.machine.operations_per_s
        )
        context.add(Figure(title, seconds["invariant"] / num_copies * 1e6, "us", "lower", limit=least_s * 1e6))
        ratio = seconds["library"] / seconds["invariant"]
        context.add(Figure(f"{title}: cuBLAS's time over it", ratio, "x", "higher", peer="cuBLAS, by torch"))


def _in_turn(maps: Sequence[Linear], x: Tensor) -> Callable[[], None]:
    def work() -> None:
        for linear in maps:
            linear(x)

    return work
