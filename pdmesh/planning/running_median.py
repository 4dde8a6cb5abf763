"""The median of the latest values. Pure."""

from bisect import bisect_left, insort
from collections import deque


class RunningMedian:
    """Of the last `size` values; adding one costs about a microsecond."""

    def __init__(self, size: int) -> None:
        self._latest: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, value: float) -> None:
        if len(self._latest) == self._latest.maxlen:
            del self._sorted[bisect_left(self._sorted, self._latest[0])]
        self._latest.append(value)
        insort(self._sorted, value)

    @property
    def value(self) -> float:
        """The upper one of two in the middle; 0 without any value."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0
