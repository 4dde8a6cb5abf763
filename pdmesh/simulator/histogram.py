"""Quantiles of durations in bounded memory: counts by size, each class RATIO times as wide as the one before. Pure."""

import math

RATIO = 1.02
"""A value is told by the geometric middle of its class: off by at most RELATIVE_ERROR of itself."""
RELATIVE_ERROR = math.sqrt(RATIO) - 1
LEAST_S = 1e-6
MOST_S = 1e6
_LOG = math.log(RATIO)
NUM_CLASSES = math.ceil(math.log(MOST_S / LEAST_S) / _LOG) + 1


class Histogram:
    """Of seconds. What is below LEAST_S or above MOST_S counts as that."""

    def __init__(self) -> None:
        self.num_values = 0
        self.total_s = 0.0
        self.max_s = 0.0
        self._counts = [0] * NUM_CLASSES

    def add(self, value_s: float) -> None:
        """One more."""
        self.num_values += 1
        self.total_s += value_s
        self.max_s = max(self.max_s, value_s)
        self._counts[round(math.log(min(max(value_s, LEAST_S), MOST_S) / LEAST_S) / _LOG)] += 1

    @property
    def mean_s(self) -> float:
        """0 without values."""
        return self.total_s / self.num_values if self.num_values else 0.0

    def quantile(self, q: float) -> float:
        """The least value that at least the share `q` of them does not exceed, within RELATIVE_ERROR; 0 without values."""
        left = max(1, math.ceil(q * self.num_values))
        for number, count in enumerate(self._counts):
            left -= count
            if left <= 0:
                return min(self.max_s, LEAST_S * RATIO**number)
        return 0.0
