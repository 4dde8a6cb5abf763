"""Metrics that are read from a router's state at each scrape."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdmesh.planning.objectives import PRIORITIES
from pdmesh.runtime.telemetry.metrics import Instrument, Readings
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.context import RouterContext
from router.fleet.circuit_breaker import BreakerStatuses
from router.fleet.worker import Worker
from router.flow_control.capacity import MAX_TENANTS, OTHERS, Tally
from router.telemetry import metrics
from router.telemetry.metrics import priority_name, tenant_name

_ROLES = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}


class StatusReader:
    """Read one router on its event loop."""

    def __init__(self, core: RouterContext, registry_connected: Callable[[], bool]) -> None:
        self._core = core
        self._registry_connected = registry_connected
        self._admission = AdmissionTotals()

    def read(self, readings: Readings) -> None:
        """Put all values; `Metrics.read_by` calls it."""
        self._read_counts(readings)
        self._read_admission(readings)
        self._read_traffic(readings)
        self._read_objectives(readings)
        self._read_workers(readings)

    def _read_counts(self, readings: Readings) -> None:
        core = self._core
        for (policy, mode), count in core.decisions.counts.items():
            readings.put(metrics.DECISIONS, count, policy, mode.value)
        readings.put(metrics.MIGRATIONS, core.num_migrations)
        readings.put(metrics.HEDGES, core.num_hedges)
        readings.put(metrics.MISMATCHES, core.num_token_mismatches)
        readings.put(metrics.REDRAWN, core.num_redrawn_tokens)
        readings.put(metrics.PREFIX_BLOCKS, len(core.prefixes.told))
        readings.put(metrics.TIER_BLOCKS, len(core.prefixes.tiers))
        readings.put(metrics.REGISTRY, self._registry_connected())

    def _read_admission(self, readings: Readings) -> None:
        admission = self._core.flow_control.admission
        self._admission.look(admission.limiter.counts.tallies)
        for instrument, counts in self._admission.counters.items():
            for labels, count in counts.items():
                readings.put(instrument, count, *labels)
        for (tenant, priority), tally in admission.limiter.counts.tallies.items():
            labels = (tenant_name(tenant), priority_name(priority))
            readings.put(metrics.INFLIGHT, tally.num_inflight, *labels)
            readings.put(metrics.QUEUED, tally.num_queued, *labels)
        readings.put(metrics.MAX_INFLIGHT, admission.max_inflight)
        readings.put(metrics.MAX_QUEUED, admission.max_queued)

    def _read_traffic(self, readings: Readings) -> None:
        now = time.monotonic()
        for model, traffic in self._core.traffic.models.items():
            readings.put(metrics.ARRIVALS, traffic.inputs.count, model)
            readings.put(metrics.UNPLACED, traffic.num_queued, model)
            readings.put(metrics.UNPLACED_AGE, traffic.queue_wait_s(now), model)

    def _read_objectives(self, readings: Readings) -> None:
        for model, objective in self._core.objectives.items():
            readings.put(metrics.OBJECTIVE_SHARE, objective.quantile, model)
            for priority, number in PRIORITIES.items():
                bounds = objective.bounds(number)
                for what, bound_ms in (("ttft", bounds.ttft_ms), ("tpot", bounds.tpot_ms)):
                    if bound_ms is not None:
                        readings.put(metrics.OBJECTIVE, bound_ms / 1000, model, priority, what)

    def _read_workers(self, readings: Readings) -> None:
        now = time.monotonic()
        breakers = BreakerStatuses(self._core.health_recorder, self._core.fleet.fleet_snapshot, now)
        for worker in self._core.fleet.workers.values():
            if worker.last is None:
                continue
            name, key = worker.last.info.worker_id, (worker.address, worker.last.info.epoch)
            for role in worker.last.load.roles:
                readings.put(metrics.WORKERS, 1, _ROLES.get(role, ""), _state(worker))
                readings.put(metrics.BREAKER_OPEN, 0, name, _ROLES.get(role, ""))
                readings.put(metrics.EJECTIONS, 0, name, _ROLES.get(role, ""))
            if worker.current is not None:
                readings.put(metrics.REPORT_AGE, max(0.0, now - worker.last.reported_at), name)
            for breaker in breakers.of(key):
                self._read_breaker(readings, name, breaker)

    def _read_breaker(self, readings: Readings, worker: str, breaker: mesh_pb2.BreakerStatus) -> None:
        role = _ROLES.get(breaker.role, "")
        readings.put(metrics.BREAKER_OPEN, breaker.left_out, worker, role)
        readings.put(metrics.EJECTIONS, breaker.num_ejections, worker, role)


@dataclass(eq=False)
class AdmissionTotals:
    """Turn tallies of admission into counters that never decrease: a quiet tenant's tally is merged into OTHERS when there are
    many, and starts at zero when the tenant returns."""

    counters: Mapping[Instrument, Counter[tuple[str, ...]]] = field(
        default_factory=lambda: {each: Counter() for each in (metrics.ADMITTED, metrics.WAITED, metrics.REFUSED)}
    )
    _names: set[str] = field(default_factory=lambda: {OTHERS})
    _seen: dict[tuple[str, int], Counter[tuple[Instrument, str]]] = field(default_factory=dict)

    def look(self, tallies: Mapping[tuple[str, int], Tally]) -> None:
        """Count what has come since the last look, under the tenant's name. What a tenant did between the last look and its merge
        counts as OTHERS."""
        now = {key: _counts(tally) for key, tally in tallies.items()}
        moved: defaultdict[int, Counter[tuple[Instrument, str]]] = defaultdict(Counter)
        for (tenant, priority), counts in self._seen.items():
            if (tenant, priority) not in now or any(counts[what] > now[tenant, priority][what] for what in counts):
                moved[priority] += counts
                self._seen[tenant, priority] = Counter()
        for (tenant, priority), counts in now.items():
            before = self._seen.get((tenant, priority), Counter())
            self._add(tenant, priority, counts - before - (moved[priority] if tenant == OTHERS else Counter()))
        self._seen = now

    def _add(self, tenant: str, priority: int, counts: Counter[tuple[Instrument, str]]) -> None:
        if tenant not in self._names and len(self._names) >= MAX_TENANTS:
            tenant = OTHERS
        self._names.add(tenant)
        for instrument in (metrics.ADMITTED, metrics.WAITED):  # shown from the beginning, because a rate needs a first value
            self.counters[instrument][tenant_name(tenant), priority_name(priority)] += 0
        for (instrument, reason), count in counts.items():
            labels = (tenant_name(tenant), priority_name(priority))
            self.counters[instrument][(*labels, reason) if instrument is metrics.REFUSED else labels] += count


def _counts(tally: Tally) -> Counter[tuple[Instrument, str]]:
    refused = {(metrics.REFUSED, reason): count for reason, count in tally.refused.items()}
    admitted = {(metrics.ADMITTED, ""): tally.num_admitted, (metrics.WAITED, ""): tally.num_waited}
    return Counter({**admitted, **refused})


def _state(worker: Worker) -> str:
    if worker.current is None or worker.last is None:
        return "lost"
    if worker.last.load.draining:
        return "draining"
    stopped = {worker_pb2.SERVING_STATE_PAUSED: "paused", worker_pb2.SERVING_STATE_ASLEEP: "asleep"}
    return stopped.get(worker.last.load.serving_state, "alive")
