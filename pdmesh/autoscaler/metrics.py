"""Exports the autoscaler's metrics: decisions and events are counted as they come, the rest is read from the loop at each
scrape."""

from __future__ import annotations

import time
from typing import get_args

from pdmesh.autoscaler.loop import Loop
from pdmesh.autoscaler.loop_history import Entry, Kind
from pdmesh.autoscaler.views import Decision, PoolDecision
from pdmesh.runtime.telemetry.metrics import OFF, Metrics, Readings, counter, gauge

# The catalogue of metrics.


WANTED = gauge("pdmesh.autoscaler.wanted", "Replicas of the pool by the latest decision", ("pool",))
REPLICAS = gauge("pdmesh.autoscaler.replicas", "Replicas before that decision: serving and starting", ("pool",))
READY = gauge("pdmesh.autoscaler.ready", "Workers that serve in the pool's roles", ("pool",))
HELD = gauge("pdmesh.autoscaler.held", "1: the latest decision keeps everything as it is", ("reason",))
DECISIONS = counter(
    "pdmesh.autoscaler.decisions",
    "Decisions for a pool: up, down, stay, and the reason of a hold",
    ("pool", "change", "held"),
)
EVENTS = counter("pdmesh.autoscaler.events", "Actions: scale, flip (role switching), hold, resume, failed", ("kind",))
FLIPPED = counter("pdmesh.autoscaler.flips", "Workers asked to switch roles", ("giver", "taker"))
FAILED_STARTS = gauge("pdmesh.autoscaler.failed_starts", "Starts that have been pending too long", ("pool",))
FORECAST = gauge("pdmesh.autoscaler.forecast", "Forecast of requests per second: mean and spread", ("what",))
DECISION_AGE = gauge("pdmesh.autoscaler.decision.age", "Since the latest decision", unit="s")
ROUND_AGE = gauge("pdmesh.autoscaler.round.age", "Since the latest completed round", unit="s")
LEADER = gauge("pdmesh.autoscaler.leader", "1: this process leads")

ALL = (
    WANTED, REPLICAS, READY, HELD, DECISIONS, EVENTS, FLIPPED, FAILED_STARTS, FORECAST, DECISION_AGE, ROUND_AGE, LEADER,
)  # fmt: skip


SERVICE = "pdmesh-autoscaler"
"""The service name in collectors and scrapers."""
_HOLDS = ("stale", "stopped", "cool-down", "step", "budget", "grew", "set by", "failed starts")
"""The first words of known reasons of a hold; any other reason has varying figures or names in it."""
OTHER_HOLD = "hold"


class AutoscalerMetrics:
    """Export the metrics of one loop."""

    def __init__(self, metrics: Metrics = OFF) -> None:
        self.metrics = metrics
        self._loop: Loop | None = None
        for kind in get_args(Kind):  # shown from the start: a rate needs a first value
            metrics.add(EVENTS, 0, kind)

    def watch(self, loop: Loop) -> None:
        """Read this loop from now on."""
        self._loop = loop
        self.metrics.read_by(self._read)

    def decided(self, decision: Decision, now_s: float) -> None:
        """Receive a decision, for `Parts.on_decision`."""
        for pool in decision.pools:
            self.metrics.add(DECISIONS, 1, pool.name.value, _change(pool), hold_name(pool.held))
        for flip in decision.flips:
            self.metrics.add(FLIPPED, flip.num, flip.giver.value, flip.taker.value)

    def happened(self, entry: Entry) -> None:
        """Receive an entry, for `History`."""
        self.metrics.add(EVENTS, 1, entry.kind)

    def _read(self, readings: Readings) -> None:
        if self._loop is None:
            return
        now_s = self._loop.clock()
        readings.put(ROUND_AGE, max(0.0, time.monotonic() - self._loop.ended_at))
        readings.put(LEADER, self._loop.latest is not None)
        expected = self._loop.expected(now_s)
        readings.put(FORECAST, expected.mean, "mean")
        readings.put(FORECAST, expected.spread, "spread")
        for name, number in self._loop.num_failed_starts(now_s).items():
            readings.put(FAILED_STARTS, number, name.value)
        for name, number in self._loop.num_ready.items():
            readings.put(READY, number, name.value)
        if self._loop.latest is not None:
            self._read_decision(readings, *self._loop.latest, now_s)

    def _read_decision(self, readings: Readings, decision: Decision, decided_s: float, now_s: float) -> None:
        readings.put(DECISION_AGE, max(0.0, now_s - decided_s))
        for pool in decision.pools:
            readings.put(WANTED, pool.replicas, pool.name.value)
            readings.put(REPLICAS, pool.before, pool.name.value)
        readings.put(HELD, decision.held is not None and decision.held_by == "stale", "stale")  # a pause is no fault


def hold_name(held: str | None) -> str:
    """Return the reason of a hold as a label of few values; "" without one."""
    if held is None:
        return ""
    return next((word for word in _HOLDS if held.startswith(word)), OTHER_HOLD)


def _change(pool: PoolDecision) -> str:
    if pool.replicas == pool.before:
        return "stay"
    return "up" if pool.replicas > pool.before else "down"
