"""How far a result is from what is expected, for the checks of GPU kernels. Nothing here imports triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half of the distance between 1 and the next number: what one rounding is off by at most, relatively."""


def over_bound(actual: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Largest error over the bound at its place; infinite for another shape or dtype, and for NaN on one side alone."""
    if actual.shape != expected.shape:
        return float("inf")
    if actual.is_meta:
        return 0.0
    error = (actual.double() - expected.double()).abs() / bound.double()
    error = torch.where(actual.isnan() & expected.isnan(), torch.zeros_like(error), error)
    worst = error.nan_to_num(nan=float("inf")).max().item() if error.numel() else 0.0
    return float(worst)


def over_roundings(actual: Tensor, expected: Tensor, roundings: float) -> float:
    """Over so many roundings of each element's own size. `expected` has the dtype that the bound is of."""
    bound = 2 * roundings * UNIT[expected.dtype] * expected.double().abs() + 1e-7
    return over_bound(actual, expected, bound)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite where something is NaN."""
    if actual.is_meta:
        return 0.0
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(difference.nan_to_num(nan=float("inf")).item())


def is_same(actual: Tensor, expected: Tensor) -> bool:
    """To the bit."""
    return actual.is_meta or torch.equal(actual, expected)


def num_differing(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Tokens at the same place that are not the same, or that one side lacks."""
    lines = zip(found, expected, strict=True)
    return sum(sum(a != b for a, b in zip(f, e, strict=False)) + abs(len(f) - len(e)) for f, e in lines)
