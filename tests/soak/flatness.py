"""Does a process's memory stand still? A line through its last two thirds, and its last half. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SLOPE = 1.0  # MB per 1000 requests
FEWEST = 6  # samples
MAX_GROWTH = 0.03  # share of the value at the beginning of the last half


@dataclass(frozen=True)
class Flatness:
    """`slope`: MB per 1000 requests over the last two thirds; `growth`: share of itself over the last half; else MB."""

    slope: float
    growth: float
    peak: float
    first_third: float
    last_third: float

    @property
    def problems(self) -> list[str]:
        """Why it is not flat, in words; shrinking is."""
        problems = []
        if self.slope > MAX_SLOPE:
            problems.append(f"grows by {self.slope:.2f} MB per 1000 requests (at most {MAX_SLOPE:g})")
        if self.growth > MAX_GROWTH:
            problems.append(f"grew by {self.growth:.1%} over the last half (at most {MAX_GROWTH:.0%})")
        return problems


def flatness(requests: Sequence[float], memory: Sequence[float]) -> Flatness:
    """`requests`: how many had been sent at each sample; `memory`: MB then. At least FEWEST samples, else ValueError."""
    count = len(requests)
    if count < FEWEST or count != len(memory):
        raise ValueError(f"{count} samples with {len(memory)} values are too few to see a slope; let it run longer")
    slope, _ = line(requests[count // 3 :], memory[count // 3 :])
    half_slope, at_half = line(requests[count // 2 :], memory[count // 2 :])
    return Flatness(
        slope=slope * 1000,
        growth=half_slope * (requests[-1] - requests[count // 2]) / at_half,
        peak=max(memory),
        first_third=statistics.median(memory[: count // 3]),
        last_third=statistics.median(memory[-(count // 3) :]),
    )


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line, and its value at the first of `xs`; level when all of them are the same."""
    if len(set(xs)) < 2:
        return 0.0, statistics.fmean(ys)
    slope, intercept = statistics.linear_regression(xs, ys)
    return slope, intercept + slope * xs[0]
