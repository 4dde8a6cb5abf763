"""Counts durations by size, in classes shared by all processes (DurationHistogram of `mesh.proto`). Pure.

Each class is RATIO times as wide as the one before, so a quantile is off by at most RELATIVE_ERROR of itself, however many
histograms it was taken over: counts of equal classes are added, and subtracted.
"""

import math
from collections.abc import Mapping

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
