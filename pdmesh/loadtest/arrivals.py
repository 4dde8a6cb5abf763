"""Arrival times in seconds since the start of a run, in order; and the distributions of flags.

All arrivals are endless except `ramp` and `replay`; all are pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count


def constant(rate: float) -> Iterator[float]:
    """Yield a time every 1/rate seconds. By multiplication, so that no error accumulates."""
    return (number / rate for number in count())


def gamma(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield times with independent gamma-distributed gaps of mean 1/rate and a coefficient of variation of 1/sqrt(burstiness).

    Burstiness 1 is a Poisson process; below 1 arrivals come in bursts, far above 1 they approach `constant`."""
    at_s = 0.0
    while True:
        at_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        yield at_s


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Yield independent arrivals: exponential gaps with mean 1/rate."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def ramp(first_rate: float, last_rate: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Yield a Poisson process whose rate goes linearly from `first_rate` to `last_rate` within `duration_s`; it ends there.

    It is a unit Poisson process in operational time, mapped back through the inverse of the cumulative rate first·t + (last −
    first)·t²/(2·duration) (Çinlar 1975, Introduction to Stochastic Processes, chapter 4.7)."""
    slope = (last_rate - first_rate) / duration_s
    total = (first_rate + last_rate) / 2 * duration_s
    expected = rng.expovariate(1)
    while expected < total:
        yield _inverse(expected, first_rate, slope)
        expected += rng.expovariate(1)


def _inverse(expected: float, first_rate: float, slope: float) -> float:
    """Return the t with first_rate·t + slope·t²/2 = expected, in the form that loses no digits when slope is near 0."""
    root = math.sqrt(max(0.0, first_rate * first_rate + 2 * slope * expected))
    return 2 * expected / (first_rate + root)


def replay(timestamps_s: Iterable[float], speed: float) -> Iterator[float]:
    """Yield the given times from the first one on, `speed` times as fast."""
    first: float | None = None
    for timestamp in timestamps_s:
        first = timestamp if first is None else first
        yield (timestamp - first) / speed


# Distributions by name, as they are given in flags: `fixed:512`, `normal:512:128`, `uniform:16:64`, …


# Names of the parameters by kind.
KINDS = {
    "fixed": ("value",),
    "uniform": ("lowest", "highest"),
    "normal": ("mean", "standard deviation"),
    "lognormal": ("median", "sigma of the logarithm"),
    "exponential": ("mean",),
}


@dataclass(frozen=True)
class Distribution:
    """Draw non-negative numbers: what falls below 0 becomes 0."""

    kind: str
    parameters: tuple[float, ...]

    def draw(self, rng: random.Random) -> float:
        """Return one value, at least 0."""
        first, second = (*self.parameters, 0.0)[:2]
        if self.kind == "fixed":
            return first
        if self.kind == "uniform":
            return rng.uniform(first, second)
        if self.kind == "normal":
            return max(0.0, rng.gauss(first, second))
        if self.kind == "lognormal":
            return first * math.exp(rng.gauss(0, second))
        return rng.expovariate(1 / first) if first else 0.0

    def draw_count(self, rng: random.Random) -> int:
        """Return one value as a number of tokens or turns: whole, at least 1. Uniform ones include both ends."""
        if self.kind == "uniform":
            return max(1, rng.randint(int(self.parameters[0]), int(self.parameters[1])))
        return max(1, round(self.draw(rng)))

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{value:g}" for value in self.parameters)])


def fixed(value: float) -> Distribution:
    """Return a distribution that is always `value`."""
    return Distribution("fixed", (value,))


def parse(text: str) -> Distribution:
    """Parse `KIND:PARAMETER:…`, or a bare number for `fixed`. Raises ValueError that says what would be right."""
    kind, *values = text.split(":")
    if not values:
        kind, values = "fixed", [kind]
    if kind not in KINDS:
        raise ValueError(f"{text!r} is not a distribution; give a number or one of {usage()}")
    try:
        parameters = tuple(float(value) for value in values)
    except ValueError:
        parameters = ()
    if len(parameters) != len(KINDS[kind]) or not all(math.isfinite(value) and value >= 0 for value in parameters):
        raise ValueError(f"{text!r} must be {_form(kind)}, with numbers that are not negative")
    if kind == "uniform" and parameters[0] > parameters[1]:
        raise ValueError(f"{text!r}: the lowest value must not exceed the highest")
    return Distribution(kind, parameters)


def parse_flag(name: str, text: str) -> Distribution:
    """Parse the value of the flag `name`. Raises ValueError that names it."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def usage() -> str:
    """Return all forms, for help and errors."""
    return ", ".join(map(_form, KINDS))


def _form(kind: str) -> str:
    return ":".join([kind, *(name.upper().replace(" ", "-") for name in KINDS[kind])])
