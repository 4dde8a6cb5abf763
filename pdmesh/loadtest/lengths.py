"""Distributions by name, as they are given in flags: `fixed:512`, `normal:512:128`, `uniform:16:64`, …"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

# Number of parameters by kind, with what they mean.
KINDS = {
    "fixed": ("value",),
    "uniform": ("lowest", "highest"),
    "normal": ("mean", "standard deviation"),
    "lognormal": ("median", "sigma of the logarithm"),
    "exponential": ("mean",),
}


@dataclass(frozen=True)
class Distribution:
    """A distribution of numbers that are not negative: what falls below 0 becomes 0."""

    kind: str
    parameters: tuple[float, ...]

    def draw(self, rng: random.Random) -> float:
        """One value, at least 0."""
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
        """One value as a number of tokens or turns: whole, at least 1. Uniform ones include both ends."""
        if self.kind == "uniform":
            return max(1, rng.randint(int(self.parameters[0]), int(self.parameters[1])))
        return max(1, round(self.draw(rng)))

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{value:g}" for value in self.parameters)])


def fixed(value: float) -> Distribution:
    """Always `value`."""
    return Distribution("fixed", (value,))


def parse(text: str) -> Distribution:
    """`KIND:PARAMETER:…`, or a bare number for `fixed`. Raises ValueError that says what would be right."""
    kind, *values = text.split(":")
    if not values:
        kind, values = "fixed", [kind]
    if kind not in KINDS:
        raise ValueError(f"{text!r} is no distribution; give a number or one of {usage()}")
    try:
        parameters = tuple(float(value) for value in values)
    except ValueError:
        parameters = ()
    if len(parameters) != len(KINDS[kind]) or not all(math.isfinite(value) and value >= 0 for value in parameters):
        raise ValueError(f"{text!r} must be {_form(kind)}, with numbers that are not negative")
    if kind == "uniform" and parameters[0] > parameters[1]:
        raise ValueError(f"{text!r}: the lowest value must not exceed the highest")
    return Distribution(kind, parameters)


def usage() -> str:
    """All forms, for help and errors."""
    return ", ".join(map(_form, KINDS))


def _form(kind: str) -> str:
    return ":".join([kind, *(name.upper().replace(" ", "-") for name in KINDS[kind])])
