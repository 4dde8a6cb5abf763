"""How much slower workers are than their models say: observed over predicted latency, bounded and slow. Pure.

Predicted is what routers had thought of the very requests that were observed, queues included: so a queue that was foreseen is no
error of the model, and load alone does not make workers look slow.
"""

import math

from pdmesh.autoscaler.forecasting.forecast import State, number
from pdmesh.autoscaler.views import Measured

LEAST, MOST = 0.8, 2.0
KEPT = 0.9
"""Of an objective: admission refuses what would miss it, so that what is seen beyond it is cut off."""
LEARN_S = 300.0
"""After which two thirds of an error are corrected."""


class Correction:
    """Of one latency."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._time_s: float | None = None

    def observe(self, now_s: float, measured: Measured, goal_s: float | None) -> None:
        """Only while nothing else changes: what is seen while pods come and go belongs to neither the old nor the new pool.

        `goal_s`: the objective. What keeps it with room needs no more workers, whatever was predicted: latencies that are longer
        than thought then show what a request takes, not how much of them a worker bears."""
        since_s = 0.0 if self._time_s is None else max(0.0, now_s - self._time_s)
        self._time_s = now_s
        if measured.observed_s is None or not measured.predicted_s:
            return
        ratio = min(MOST, max(LEAST, measured.observed_s / measured.predicted_s))
        if goal_s is None or measured.observed_s <= KEPT * goal_s:
            ratio = min(1.0, ratio)
        # A gap does not make one figure worth more than a minute of them.
        weight = 1 - math.exp(-min(since_s, 60.0) / LEARN_S)
        self.factor *= (ratio / self.factor) ** weight

    def skip(self, now_s: float) -> None:
        """Nothing is learned from the time until now."""
        self._time_s = now_s

    def save(self) -> State:
        return {"factor": self.factor}

    def restore(self, state: State) -> None:
        """Raises ValueError."""
        self.factor = min(MOST, max(LEAST, number(state, "factor")))
