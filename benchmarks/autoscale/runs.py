"""One autoscaler on one load in the simulator, and what came of it; rivals as scalers of a simulated mesh."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.autoscale.rivals import DynamoPlanner, DynamoSettings, Hpa, HpaSettings, Interval
from benchmarks.autoscale.scenario import Scenario
from pdmesh.autoscaler.collect.traffic import Counts, lengths_of
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import PoolName
from pdmesh.planning.capacity_load import Limits, Worker, middle_s
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.autoscaling import (
    Autoscaled,
    AutoscaledSettings,
    Moment,
    OwnScaler,
    Scaler,
    Seen,
    Wanted,
    goals_of,
    reversals,
)
from pdmesh.simulator.results import Results, Window
from pdmesh.simulator.workers.spec import WorkerSpec

POOLS = (PoolName.PREFILL, PoolName.DECODE)
WINDOW_S = 60.0
START_S = 60.0
COOL_DOWN_S = AutoscalerSettings().cool_down_s

UTILIZATION = 0.8
"""What autoscaling/v2 takes where no metric is given (API reference of HorizontalPodAutoscalerSpec: 80 % of CPU)."""
QUEUED = 5.0
"""Requests that wait for each replica: the threshold of the vLLM production stack's guide to autoscaling with KEDA."""
HPA_SYNC_S = 15.0


@dataclass(frozen=True)
class Outcome:
    """Of one run. `num_flips` workers changed roles; `moments` for those who look at it."""

    attainment: float
    pod_seconds: float
    by_pool: Mapping[str, float]
    num_reversals: int
    num_flips: int
    windows: tuple[Window, ...]
    moments: tuple[Moment, ...]
    ended_s: float

    @property
    def misses(self) -> list[int]:
        """By window."""
        return [window.num_arrived - window.num_met for window in self.windows]


def play(
    scenario: Scenario, arrivals: list[Arrival], scaler: Scaler, start: Mapping[PoolName, int], start_s: float = START_S
) -> Outcome:
    """The load through a mesh that `scaler` scales, whose pods serve `start_s` after they are asked for."""
    gc.freeze()  # what is there stays, and what comes has no cycles
    results = Results(window_s=WINDOW_S)
    scaled = Autoscaled(scenario.mesh(), results, scenario.specs, scaler, AutoscaledSettings(start_s=start_s))
    scaled.start(start)
    scaled.run(arrivals)
    by_pool = scaled.mesh.pod_seconds()
    return Outcome(
        results.total.attainment,
        sum(by_pool.values()),
        by_pool,
        reversals(scaled.moments, COOL_DOWN_S),
        sum(move.num for moment in scaled.moments for move in moment.moves),
        tuple(results.windows),
        tuple(scaled.moments),
        results.ended_at,
    )


def own(scenario: Scenario, start_s: float = START_S) -> Scaler:
    """Ours, with its defaults but for the starts that it is told of."""
    pool = PoolSettings(start_s=start_s)
    return OwnScaler(AutoscalerSettings(prefill=pool, decode=pool, both=pool), goals_of(scenario.objective))


class _Held:
    """Asked every period of its own, and as it said until then."""

    def __init__(self, period_s: float, decide: Callable[[Seen], Mapping[PoolName, int]]) -> None:
        self._period_s, self._decide = period_s, decide
        self._next_s = 0.0
        self._latest: Mapping[PoolName, int] | None = None

    def decide(self, seen: Seen) -> Wanted:
        """Pods that have died in between are not replaced before."""
        if seen.snapshot.now_s >= self._next_s - 1e-9:
            self._latest = self._decide(seen)
            self._next_s = seen.snapshot.now_s + self._period_s
        assert self._latest is not None
        return Wanted(self._latest)


def fixed(replicas: Mapping[PoolName, int]) -> Scaler:
    """So many, whatever comes."""
    return _Held(float("inf"), lambda seen: replicas)


def hpa_cpu(scenario: Scenario) -> Scaler:
    """Kubernetes' on utilization: of the latest 15 s, the share of the time in which a worker had something under way."""
    hpas = {pool: Hpa(HpaSettings(UTILIZATION)) for pool in POOLS}
    recent: dict[PoolName, deque[float]] = {pool: deque(maxlen=3) for pool in POOLS}

    def decide(seen: Seen) -> dict[PoolName, int]:
        now_s = seen.snapshot.now_s
        views = {view.name: view for view in seen.snapshot.pools}
        return {
            pool: hpa.by_utilization(
                now_s,
                sum(recent[pool]) / max(1, len(recent[pool])),
                views[pool].num_ready,
                len(views[pool].starting_ages_s),
            )
            for pool, hpa in hpas.items()
        }

    held = _Held(HPA_SYNC_S, decide)

    class Sampled:
        def decide(self, seen: Seen) -> Wanted:
            for pool in POOLS:
                recent[pool].append(seen.busy[pool])
            return held.decide(seen)

    return Sampled()


def hpa_queue(scenario: Scenario) -> Scaler:
    """Kubernetes' on the length of queues: prompts that wait in the workers of the pool, and requests that wait at routers."""
    hpas = {pool: Hpa(HpaSettings(QUEUED)) for pool in POOLS}

    def decide(seen: Seen) -> dict[PoolName, int]:
        at_routers = seen.snapshot.traffic.num_queued
        return {
            view.name: hpas[view.name].by_queue(seen.snapshot.now_s, seen.num_waiting[view.name] + at_routers, view.num_replicas)
            for view in seen.snapshot.pools
        }

    return _Held(HPA_SYNC_S, decide)


def dynamo(scenario: Scenario) -> Scaler:
    """Dynamo's planner: throughput-based scaling as published, every 180 s; on what our routers count, TTFT from the choice of
    workers on."""
    worker = worker_of(scenario.spec)
    planner = DynamoPlanner(DynamoSettings(worker, worker, goals_of(scenario.objective)))
    before = Counts()

    def decide(seen: Seen) -> dict[PoolName, int]:
        nonlocal before
        interval, before = seen.counts - before, seen.counts
        views = {view.name: view for view in seen.snapshot.pools}
        lengths = lengths_of(interval)
        if lengths is None or seen.snapshot.now_s < 60.0:
            return {pool: views[pool].num_replicas for pool in POOLS}
        told = Interval(interval.num_arrived, lengths, _mean_s(interval.ttft_observed), _mean_s(interval.tpot_observed))
        prefill, decode = planner.decide(told, views[PoolName.DECODE].num_ready)
        return {PoolName.PREFILL: prefill, PoolName.DECODE: decode}

    return _Held(180.0, decide)


def _mean_s(durations: Counter[int]) -> float | None:
    """Of classes (`pdmesh/planning/duration_histogram.py`); None without any."""
    num = durations.total()
    return sum(count * middle_s(number) for number, count in durations.items()) / num if num else None


def worker_of(spec: WorkerSpec) -> Worker:
    """What capacity arithmetic calls it."""
    limits = Limits(spec.max_num_batched_tokens, spec.max_num_seqs, spec.num_blocks * spec.block_size)
    return Worker(spec.speed, limits, spec.keeps_pace, spec.drafts)
