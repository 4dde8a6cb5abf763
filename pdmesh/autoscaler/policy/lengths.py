"""What requests ask for, without the noise of a few of them. Pure.

The mean square of a window's prompts hangs on the longest one or two; a pool that followed it would move with each of them. So
all moments are smoothed over a minute, and what was last known holds while nobody comes.
"""

import math

from pdmesh.autoscaler.forecasting.forecast import State, number
from pdmesh.autoscaler.views import Traffic
from pdmesh.planning.capacity_load import Lengths

SMOOTH_S = 60.0
_FIELDS = ("input_tokens", "input_squared", "output_tokens", "cached_share", "output_squared")


class SmoothedLengths:
    """`latest`: None before the first request. `burstiness` of arrivals, smoothed with them."""

    def __init__(self) -> None:
        self.latest: Lengths | None = None
        self.burstiness = 1.0
        self._time_s: float | None = None
        self._looked_s: float | None = None

    def observe(self, now_s: float, traffic: Traffic) -> None:
        """Nobody came: nothing is learned of lengths, and the burst before the silence tells less and less."""
        silent_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        if traffic.lengths is None or traffic.rate_per_s == 0:
            self.burstiness += (1 - math.exp(-silent_s / SMOOTH_S)) * (1 - self.burstiness)
            return
        since_s = SMOOTH_S if self._time_s is None else max(0.0, now_s - self._time_s)
        weight = 1 - math.exp(-since_s / SMOOTH_S) if self.latest is not None else 1.0
        self.latest = _between(self.latest or traffic.lengths, traffic.lengths, weight)
        self.burstiness += weight * (traffic.burstiness - self.burstiness)
        self._time_s = now_s

    def save(self) -> State:
        """What `restore` of a new one takes; empty before the first request."""
        if self.latest is None or self._time_s is None:
            return {}
        return {name: getattr(self.latest, name) for name in _FIELDS} | {"burstiness": self.burstiness, "time_s": self._time_s}

    def restore(self, state: State) -> None:
        """Raises ValueError."""
        if not state:
            return
        tokens, squares, outputs, cached = (number(state, name) for name in _FIELDS[:4])
        squared = None if state.get("output_squared") is None else number(state, "output_squared")
        self.latest = Lengths(tokens, squares, outputs, cached, squared)
        self.burstiness, self._time_s = number(state, "burstiness"), number(state, "time_s")


def _between(before: Lengths, after: Lengths, weight: float) -> Lengths:
    """Means of means and of squares are those of all requests together."""
    tokens, squares, outputs, cached = (
        (1 - weight) * getattr(before, name) + weight * getattr(after, name) for name in _FIELDS[:4]
    )
    squared = after.output_squared
    if squared is not None and before.output_squared is not None:
        squared = (1 - weight) * before.output_squared + weight * squared
    return Lengths(tokens, squares, outputs, cached, squared)
