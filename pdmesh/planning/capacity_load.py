"""Inputs of capacity planning: a load, one kind of worker and the objectives. Pure values; seconds and tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from pdmesh.planning.latency_model import NO_DRAFTS, Drafts, LatencyModel

NUM_POINTS = 64
"""Equally likely prompt lengths that represent the distribution."""

_BISECTIONS = 40
_WIDEST = 8.0  # bound on the spread of a length's logarithm; wider than any traffic


@dataclass(frozen=True)
class Lengths:
    """Hold the lengths of requests, in tokens. `*_squared`: the mean of the square, so the variance is that less the mean's
    square.

    `cached_share`: the share of prompt tokens that are prefix hits. `output_squared` None: outputs are taken to end at any token
    with equal chance, which is 2 · mean²."""

    input_tokens: float
    input_squared: float
    output_tokens: float
    cached_share: float = 0.0
    output_squared: float | None = None

    def __post_init__(self) -> None:
        if not self.input_tokens >= 1:
            raise ValueError(f"input_tokens: {self.input_tokens} is less than one token")
        if not self.output_tokens >= 1:
            raise ValueError(f"output_tokens: {self.output_tokens} is less than one token")
        if not self.input_squared >= self.input_tokens**2 * (1 - 1e-9):
            raise ValueError(f"input_squared: {self.input_squared} is less than the square of the mean, {self.input_tokens**2}")
        if self.output_squared is not None and not self.output_squared >= self.output_tokens**2 * (1 - 1e-9):
            raise ValueError(f"output_squared: {self.output_squared} is less than the square of the mean")
        if not 0 <= self.cached_share < 1:
            raise ValueError(f"cached_share: {self.cached_share} is not in [0, 1)")

    @property
    def running_context(self) -> float:
        """Return the context of a running sequence, at a random moment: long outputs run for longer, so they are seen more."""
        squared = 2 * self.output_tokens**2 if self.output_squared is None else self.output_squared
        return self.input_tokens + squared / (2 * self.output_tokens)

    @property
    def points(self) -> tuple[float, ...]:
        """Return `NUM_POINTS` equally likely prompt lengths with this mean and mean square; spread like a log-normal."""
        return _points(self.input_tokens, self.input_squared)

    @property
    def output_points(self) -> tuple[float, ...]:
        """Return `NUM_POINTS` equally likely output lengths: exponential, or spread like a log-normal with this mean square."""
        if self.output_squared is None:
            return tuple(-self.output_tokens * math.log(1 - (number + 0.5) / NUM_POINTS) for number in range(NUM_POINTS))
        return _points(self.output_tokens, self.output_squared)


@dataclass(frozen=True)
class Load:
    """Hold a rate in requests a second, and the lengths. `burstiness`: the squared coefficient of variation of the gaps between
    requests, 1 for independent arrivals."""

    rate_per_s: float
    lengths: Lengths
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s >= 0):
            raise ValueError(f"rate_per_s: {self.rate_per_s} is not a number of requests a second")
        if not (math.isfinite(self.burstiness) and self.burstiness >= 0):
            raise ValueError(f"burstiness: {self.burstiness} is not a number from 0 up")

    def at(self, rate_per_s: float) -> "Load":
        """Return the same requests at another rate."""
        return replace(self, rate_per_s=rate_per_s)


@dataclass(frozen=True)
class Limits:
    """Hold the limits of one worker: tokens of a step, concurrent sequences, tokens of KV."""

    max_num_batched_tokens: int
    max_num_seqs: int
    kv_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "kv_tokens"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")


@dataclass(frozen=True)
class Worker:
    """Describe one kind of worker: the times of its steps, and its limits. `keeps_pace`: its steps hold prompts back so that
    running sequences keep their TPOT objectives. `drafts`: speculation, as far as it pays."""

    model: LatencyModel
    limits: Limits
    keeps_pace: bool = True
    drafts: Drafts = NO_DRAFTS

    def slower(self, factor: float) -> "Worker":
        """Return the same worker with each step `factor` times as long."""
        model = self.model
        return replace(
            self,
            model=replace(
                model,
                fixed_s=model.fixed_s * factor,
                per_prefill_token_s=model.per_prefill_token_s * factor,
                per_prefill_context_s=model.per_prefill_context_s * factor,
                per_sequence_s=model.per_sequence_s * factor,
                per_context_token_s=model.per_context_token_s * factor,
            ),
        )


@dataclass(frozen=True)
class Goals:
    """Hold objectives in seconds, None without one; `quantile`: the share of requests that must keep all of them, in [0.5, 1).

    `transit_s`: the part of TTFT outside the workers: the router, the reservation, the way back."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    quantile: float = 0.99
    transit_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value} is not more than 0; None means that nothing is promised")
        if not 0.5 <= self.quantile < 1:
            raise ValueError(f"quantile: {self.quantile} is not in [0.5, 1)")

    @property
    def each(self) -> float:
        """Return the share that must keep each objective by itself, so that `quantile` keep all of them even if misses are
        disjoint."""
        num_goals = (self.ttft_s is not None) + (self.tpot_s is not None)
        return 1 - (1 - self.quantile) / max(1, num_goals)


@lru_cache(maxsize=256)
def _points(mean: float, mean_squared: float) -> tuple[float, ...]:
    """Return the points. Cut into so few, a log-normal loses the end of its tail: the spread is widened until the points have the
    moments."""
    wanted = max(1.0, mean_squared / mean**2)
    low, high = 0.0, _WIDEST
    for _ in range(_BISECTIONS):
        spread = (low + high) / 2
        shape = _shape(spread)
        if sum(x * x for x in shape) / NUM_POINTS < wanted:
            low = spread
        else:
            high = spread
    return tuple(mean * x for x in _shape((low + high) / 2))


def _shape(spread: float) -> list[float]:
    """Return the points' shape with a mean of 1."""
    raw = [math.exp(spread * z) for z in _NORMAL]
    mean = sum(raw) / NUM_POINTS
    return [x / mean for x in raw]


_NORMAL = tuple(NormalDist().inv_cdf((number + 0.5) / NUM_POINTS) for number in range(NUM_POINTS))


# Counts durations by size, in classes shared by all processes (DurationHistogram of `mesh.proto`). Pure.
#
# Each class is RATIO times as wide as the one before, so a quantile is off by at most RELATIVE_ERROR of itself, however many
# histograms it was taken over: counts of equal classes are added, and subtracted.


LEAST_S = 1e-5
RATIO = 1.05
NUM_CLASSES = 400
RELATIVE_ERROR = math.sqrt(RATIO) - 1
_LOG = math.log(RATIO)


def class_of(seconds: float) -> int:
    """Return the number of its class; the first also holds what is shorter, the last what is longer."""
    if not seconds > LEAST_S:
        return 0
    return math.floor(min(NUM_CLASSES - 1, math.log(seconds / LEAST_S) / _LOG))


def middle_s(number: int) -> float:
    """Return the duration that represents the class."""
    return LEAST_S * math.exp(_LOG * (number + 0.5))


def quantile_s(counts: Mapping[int, int], q: float) -> float | None:
    """Return the middle of the class that at least the share `q` of all durations does not exceed; None without any."""
    left = math.ceil(q * sum(counts.values()))
    for number in sorted(counts):
        left -= counts[number]
        if left <= 0 and counts[number] > 0:
            return middle_s(number)
    return None
