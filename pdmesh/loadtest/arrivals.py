"""When requests start: seconds since the start of a run, in order. All are endless but `ramp` and `replay`; all are pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import count


def constant(rate: float) -> Iterator[float]:
    """Every 1/rate seconds. By multiplication, so that no error adds up."""
    return (number / rate for number in count())


def gamma(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Independent gamma-distributed gaps with mean 1/rate and a coefficient of variation of 1/sqrt(burstiness).

    Burstiness 1 is a Poisson process; below 1 arrivals come in bursts, far above 1 they approach `constant`.
    """
    at_s = 0.0
    while True:
        at_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        yield at_s


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Independent arrivals: exponential gaps with mean 1/rate."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def ramp(first_rate: float, last_rate: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """A Poisson process whose rate goes linearly from `first_rate` to `last_rate` within `duration_s`; ends there.

    A unit Poisson process in operational time, mapped back through the inverse of the cumulative rate
    first·t + (last − first)·t²/(2·duration) (Çinlar 1975, Introduction to Stochastic Processes, chapter 4.7).
    """
    slope = (last_rate - first_rate) / duration_s
    total = (first_rate + last_rate) / 2 * duration_s
    expected = rng.expovariate(1)
    while expected < total:
        yield _inverse(expected, first_rate, slope)
        expected += rng.expovariate(1)


def _inverse(expected: float, first_rate: float, slope: float) -> float:
    """The t with first_rate·t + slope·t²/2 = expected, in the form that loses no digits when slope is near 0."""
    root = math.sqrt(max(0.0, first_rate * first_rate + 2 * slope * expected))
    return 2 * expected / (first_rate + root)


def replay(timestamps_s: Iterable[float], speed: float) -> Iterator[float]:
    """The given times from the first one on, `speed` times as fast."""
    first: float | None = None
    for timestamp in timestamps_s:
        first = timestamp if first is None else first
        yield (timestamp - first) / speed
