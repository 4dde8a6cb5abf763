"""Compares two results, with the confidence of each difference.

Successive requests are correlated (they met the same queue), so resampling single requests would promise too much: the bootstrap
draws blocks of consecutive time (Künsch 1989, the jackknife and the bootstrap for general stationary observations).

Up to fourteen intervals of 95 % each would seldom all be right: they are widened so that all of one comparison are, in 95 % of
comparisons (Bonferroni 1936, whatever the correlation of the figures).
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pdmesh.loadtest.result import Result
from pdmesh.loadtest.stats import quantile

NUM_BLOCKS = 15
NUM_RESAMPLES = 400
CONFIDENCE = 0.95
_NUM_FIGURES = 14
_NORMAL = statistics.NormalDist()
_FAR = _NORMAL.inv_cdf(1 - (1 - CONFIDENCE) / 2 / _NUM_FIGURES)
# Student's t for so few blocks (Cornish and Fisher's first term).
_WIDER = (_FAR + (_FAR**3 + _FAR) / 4 / (NUM_BLOCKS - 1)) / _NORMAL.inv_cdf(1 - (1 - CONFIDENCE) / 2)


@dataclass(frozen=True)
class Difference:
    """Hold one figure of both runs; `low` and `high` bound b − a, all of a comparison together with CONFIDENCE. `worse`: b is
    surely worse; `better` likewise."""

    name: str
    unit: str
    a: float
    b: float
    low: float
    high: float
    higher_is_better: bool

    @property
    def sure(self) -> bool:
        """Return whether the interval excludes no difference."""
        return self.low > 0 or self.high < 0

    @property
    def better(self) -> bool:
        return self.sure and (self.low > 0) == self.higher_is_better

    @property
    def worse(self) -> bool:
        return self.sure and not self.better

    @property
    def relative(self) -> float | None:
        """Return the change as a share of a."""
        return (self.b - self.a) / self.a if self.a else None


# Maps block weights to the figures of that resample.
_Figures = Callable[[Sequence[int]], Sequence[float]]
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def compare(a: Result, b: Result, seed: int = 0) -> list[Difference]:
    """Return differences of latencies, attainment and goodput, for the figures that both runs have."""
    rng = random.Random(seed)
    draws = [(_weights(rng), _weights(rng)) for _ in range(NUM_RESAMPLES)]
    differences = []
    for metric in ("ttft", "tpot", "e2e"):
        names = [f"{metric.upper()} {name}" for name in _QUANTILES]
        of_a, of_b = (_quantiles(result, getattr(result.sample, metric)) for result in (a, b))
        differences += _differences(names, "ms", of_a, of_b, draws, higher_is_better=False)
    names = [f"TTFT of later turns {name}" for name in _QUANTILES]
    differences += _differences(names, "ms", _later_ttft(a), _later_ttft(b), draws, higher_is_better=False)
    differences += _differences(["attainment"], "%", _attainment(a), _attainment(b), draws, higher_is_better=True)
    return differences + _differences(["goodput"], "1/s", _goodput(a), _goodput(b), draws, higher_is_better=True)


def _differences(
    names: Sequence[str],
    unit: str,
    a: _Figures | None,
    b: _Figures | None,
    draws: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    higher_is_better: bool,
) -> list[Difference]:
    if a is None or b is None:
        return []
    once = [1] * NUM_BLOCKS
    resampled = [[y - x for x, y in zip(a(first), b(second), strict=True)] for first, second in draws]
    tail = (1 - CONFIDENCE) / 2
    differences = []
    for index, (name, x, y) in enumerate(zip(names, a(once), b(once), strict=True)):
        ordered = sorted(figures[index] for figures in resampled)
        low, middle, high = (quantile(ordered, q) for q in (tail, 0.5, 1 - tail))
        # There are too few resamples this far out: the interval at 95 % is widened.
        low, high = middle - _WIDER * (middle - low), middle + _WIDER * (high - middle)
        differences.append(Difference(name, unit, x, y, low, high, higher_is_better))
    return differences


def _weights(rng: random.Random) -> list[int]:
    """Return how often each block is drawn, of NUM_BLOCKS draws with replacement."""
    weights = [0] * NUM_BLOCKS
    for _ in range(NUM_BLOCKS):
        weights[rng.randrange(NUM_BLOCKS)] += 1
    return weights


def _blocks(result: Result) -> list[int]:
    """Return the block of each request, by when it was due."""
    window = result.window
    width = window.length_s / NUM_BLOCKS
    return [min(NUM_BLOCKS - 1, int((at_s - window.start_s) / width)) for at_s in result.sample.scheduled_s]


def _later_ttft(result: Result) -> _Figures | None:
    """Return the figures of turns behind the first; None where there were none, or the result is older than this figure."""
    sample = result.sample
    if not any(sample.depth):
        return None
    return _quantiles(result, [ttft if depth else None for ttft, depth in zip(sample.ttft, sample.depth, strict=True)])


def _quantiles(result: Result, column: Sequence[float | None]) -> _Figures | None:
    pairs = sorted((value, block) for value, block in zip(column, _blocks(result), strict=True) if value is not None)
    if not pairs:
        return None
    values, blocks = [value for value, _ in pairs], [block for _, block in pairs]

    def figures(weights: Sequence[int]) -> list[float]:
        cumulative = list(accumulate(map(weights.__getitem__, blocks)))
        places = (bisect_left(cumulative, q * cumulative[-1]) for q in _QUANTILES.values())
        return [values[min(place, len(values) - 1)] for place in places]

    return figures


def _attainment(result: Result) -> _Figures | None:
    kept, counted = _verdicts(result)
    if not sum(counted):
        return None

    def figures(weights: Sequence[int]) -> list[float]:
        total = _weighted(weights, counted)
        return [100 * _weighted(weights, kept) / total if total else 0.0]

    return figures


def _goodput(result: Result) -> _Figures:
    kept, _ = _verdicts(result)
    return lambda weights: [_weighted(weights, kept) / result.window.length_s]


def _weighted(weights: Sequence[int], counts: Sequence[int]) -> int:
    return sum(weight * count for weight, count in zip(weights, counts, strict=True))


def _verdicts(result: Result) -> tuple[list[int], list[int]]:
    """Return by block: requests that kept their objectives, and requests that count."""
    kept, counted = [0] * NUM_BLOCKS, [0] * NUM_BLOCKS
    for block, verdict in zip(_blocks(result), result.sample.met, strict=True):
        if verdict is not None:
            kept[block] += verdict
            counted[block] += 1
    return kept, counted
