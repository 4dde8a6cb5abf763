"""How fast a pool's workers are, without the noise of their latest steps. Pure.

A worker refits its model every few steps; on a machine that does other things too, one fit may say ten times what the last one
did. So of all that a typical worker has said within a minute the one in the middle counts, as with workers themselves.
"""

from collections import deque
from collections.abc import Callable, Collection
from statistics import median_low
from typing import TypeVar

from pdmesh.planning.capacity_load import Worker
from pdmesh.planning.latency_model import LatencyModel, Work, prefill_context

T = TypeVar("T")
USUAL = Work(prefill_tokens=512, prefill_context=prefill_context(0, 512), num_decoding=8, decode_context=8 * 512)
"""A step by which workers' speeds are compared."""

KEEP_S = 60.0


def typical_speed(told: Collection[LatencyModel]) -> LatencyModel | None:
    """The one in the middle; those that were measured count before those that are only guessed. None without any."""
    measured = [latency for latency in told if latency.num_steps]
    return middle(measured or told, lambda latency: latency.step_s(USUAL))


def middle(values: Collection[T], measure: Callable[[T], float]) -> T | None:
    """One of them; None without any."""
    if not values:
        return None
    found = median_low([measure(value) for value in values])
    return next(value for value in values if measure(value) == found)


class Speed:
    """Of one pool."""

    def __init__(self) -> None:
        self._told: deque[tuple[float, Worker]] = deque()

    def observe(self, now_s: float, worker: Worker | None) -> None:
        """The typical worker of the moment; None: nobody is there, and what was last known still holds."""
        if worker is None:
            return
        self._told.append((now_s, worker))
        while self._told[0][0] <= now_s - KEEP_S:
            self._told.popleft()

    @property
    def latest(self) -> Worker | None:
        """The limits that were told last, and the speed in the middle of the latest minute. None before anybody has told."""
        if not self._told:
            return None
        latency = typical_speed([worker.model for _, worker in self._told])
        return None if latency is None else Worker(latency, self._told[-1][1].limits)
