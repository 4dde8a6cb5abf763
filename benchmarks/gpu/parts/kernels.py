"""Every Triton kernel against its reference on this device, at the shapes that are measured later."""

from __future__ import annotations

from itertools import chain

import torch

from benchmarks.gpu.context import Context
from benchmarks.harness import Figure
from tests.gpu.checks import attention_checks, checks, linear_checks

EXPECTED_S = 1.5


@torch.inference_mode()
def run(context: Context) -> None:
    for name, check in chain(checks(context), attention_checks(context), linear_checks(context)):
        if not context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, name):
            context.fail(f"{name}: not compared, the part's time was over")
            continue
        error = check(context)
        if not error <= 1.0:
            context.fail(f"{name}: the error is {error:.3g} times what it may be")
        value = error if error != float("inf") else "not equal"
        context.add(Figure(f"error over its bound: {name}", value, "x", "lower", goal=1.0))
