"""How many requests took how long: classes that grow by a constant factor, so that 5 ms and 5 s fit on one axis. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CLASSES_PER_DECADE = 10
MAX_CLASSES = 40
_LEAST_MS = 1e-3


@dataclass(frozen=True)
class Class:
    """Durations from `from_ms` up to, but without, `to_ms`; `missed` of the `count` broke their objective."""

    from_ms: float
    to_ms: float
    count: int
    missed: int


def classes(durations_ms: Sequence[tuple[float, bool]]) -> list[Class]:
    """Of (duration, whether it broke its objective), without gaps from the shortest to the longest; at most MAX_CLASSES, which
    are wider where that takes it. Empty for none."""
    if not durations_ms:
        return []
    exponents = [math.log10(max(_LEAST_MS, duration)) for duration, _ in durations_ms]
    per_decade = _per_decade(min(exponents), max(exponents))
    first, last = _number(min(exponents), per_decade), _number(max(exponents), per_decade)
    counts = [[0, 0] for _ in range(last - first + 1)]
    for exponent, (_, is_missed) in zip(exponents, durations_ms, strict=True):
        counted = counts[_number(exponent, per_decade) - first]
        counted[0] += 1
        counted[1] += is_missed
    edges = [10 ** ((first + index) / per_decade) for index in range(len(counts) + 1)]
    return [Class(edges[index], edges[index + 1], *counted) for index, counted in enumerate(counts)]


def quantile(sorted_values: Sequence[float], share: float) -> float | None:
    """The value that `share` of them do not exceed (nearest rank); None for none."""
    if not sorted_values:
        return None
    return sorted_values[max(0, math.ceil(share * len(sorted_values)) - 1)]


def _per_decade(least: float, most: float) -> int:
    for per_decade in range(CLASSES_PER_DECADE, 1, -1):
        if _number(most, per_decade) - _number(least, per_decade) < MAX_CLASSES:
            return per_decade
    return 1


def _number(exponent: float, per_decade: int) -> int:
    # Edges are powers of ten: what lies on one must not fall below it for rounding's sake.
    return math.floor(exponent * per_decade + 1e-9)
