"""An autoscaler's metrics: decisions and events are counted as they come, the rest is read from the loop at each scrape."""

from __future__ import annotations

import time
from typing import get_args

from pdmesh.autoscaler import instruments
from pdmesh.autoscaler.decision import Decision, PoolDecision
from pdmesh.autoscaler.loop import Loop
from pdmesh.autoscaler.loop_history import Entry, Kind
from pdmesh.runtime.telemetry.metrics import OFF, Metrics, Readings

SERVICE = "pdmesh-autoscaler"
"""As collectors and scrapers know it."""
_HOLDS = ("stale", "cool-down", "step", "budget", "grew", "set by", "failed starts")
"""Of what keeps a pool as it is, how it begins; whatever else does has other figures or names in it each time."""
OTHER_HOLD = "hold"


class AutoscalerMetrics:
    """Listens to one loop."""

    def __init__(self, metrics: Metrics = OFF) -> None:
        self.metrics = metrics
        self._loop: Loop | None = None
        for kind in get_args(Kind):  # shown from the beginning: a rate needs a first value
            metrics.add(instruments.EVENTS, 0, kind)

    def watch(self, loop: Loop) -> None:
        """Read this one from now on."""
        self._loop = loop
        self.metrics.read_by(self._read)

    def decided(self, decision: Decision, now_s: float) -> None:
        """For `Parts.on_decision`."""
        for pool in decision.pools:
            self.metrics.add(instruments.DECISIONS, 1, pool.name.value, _change(pool), hold_name(pool.held))
        for flip in decision.flips:
            self.metrics.add(instruments.FLIPPED, flip.num, flip.giver.value, flip.taker.value)

    def happened(self, entry: Entry) -> None:
        """For `History`."""
        self.metrics.add(instruments.EVENTS, 1, entry.kind)

    def _read(self, readings: Readings) -> None:
        if self._loop is None:
            return
        now_s = self._loop.clock()
        readings.put(instruments.ROUND_AGE, max(0.0, time.monotonic() - self._loop.ended_at))
        readings.put(instruments.LEADER, self._loop.latest is not None)
        expected = self._loop.expected(now_s)
        readings.put(instruments.FORECAST, expected.mean, "mean")
        readings.put(instruments.FORECAST, expected.spread, "spread")
        for name, number in self._loop.num_failed_starts(now_s).items():
            readings.put(instruments.FAILED_STARTS, number, name.value)
        for name, number in self._loop.num_ready.items():
            readings.put(instruments.READY, number, name.value)
        if self._loop.latest is not None:
            self._read_decision(readings, *self._loop.latest, now_s)

    def _read_decision(self, readings: Readings, decision: Decision, decided_s: float, now_s: float) -> None:
        readings.put(instruments.DECISION_AGE, max(0.0, now_s - decided_s))
        for pool in decision.pools:
            readings.put(instruments.WANTED, pool.replicas, pool.name.value)
            readings.put(instruments.REPLICAS, pool.before, pool.name.value)
        readings.put(instruments.HELD, decision.held is not None, "stale")


def hold_name(held: str | None) -> str:
    """One of few words; "" where nothing holds."""
    if held is None:
        return ""
    return next((word for word in _HOLDS if held.startswith(word)), OTHER_HOLD)


def _change(pool: PoolDecision) -> str:
    if pool.replicas == pool.before:
        return "stay"
    return "up" if pool.replicas > pool.before else "down"
