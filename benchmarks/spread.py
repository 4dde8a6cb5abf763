"""The spread of what was measured in turns: the median, and the quartiles beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple


class Spread(NamedTuple):
    """Hold the median of samples with their quartiles."""

    low: float
    median: float
    high: float
    num_samples: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Return the spread of at least one sample. Raises StatisticsError for none."""
        found = list(samples)
        median = statistics.median(found)
        low, high = (statistics.quantiles(found)[::2]) if len(found) > 1 else (median, median)
        return cls(low, median, high, len(found))

    @property
    def in_words(self) -> str:
        """Return the quartiles for the column beside a figure."""
        return f"quartiles of {self.num_samples} turns: {self.low:.4g} to {self.high:.4g}"
