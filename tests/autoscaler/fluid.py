"""A mesh as a fluid: each pool bears so many requests a second within the objectives; pods take a minute; days and bursts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.views import PoolName, Snapshot, Traffic
from pdmesh.planning.capacity import DecodePool, Pool, PrefillPool, bearable, fewest
from pdmesh.planning.capacity_load import Load, Worker
from tests.autoscaler.scenes import DECODE, GOALS, LENGTHS, LIMITS, MODEL, PREFILL, view

TICK_S, START_S, WINDOW_S = 10.0, 60.0, 15.0
WORKER = Worker(MODEL, LIMITS)
POOLS: dict[PoolName, Pool] = {PREFILL: PrefillPool(WORKER, GOALS), DECODE: DecodePool(WORKER, GOALS)}
Scaler = Callable[["Mesh", float, float], dict[PoolName, int]]


@cache
def borne(name: PoolName, num: int) -> float:
    return bearable(POOLS[name], Load(1.0, LENGTHS), num)


@cache
def needed(name: PoolName, rate: float) -> int:
    return fewest(POOLS[name], Load(rate, LENGTHS), 999) or 1


@dataclass
class Mesh:
    """`num_queued`: who waits, in a mesh that refuses nobody; one that does turns away what it cannot serve in time."""

    ready: dict[PoolName, int]
    refuses: bool = True
    starting: dict[PoolName, list[float]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})
    num_queued: float = 0.0
    num_asked: float = 0.0
    num_good: float = 0.0
    pod_s: float = 0.0
    changes: dict[PoolName, list[tuple[float, int]]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})

    def serve(self, now_s: float, rate: float) -> None:
        """One tick."""
        for name, asked in self.starting.items():
            self.ready[name] += sum(now_s - since_s >= START_S for since_s in asked)
            self.starting[name] = [since_s for since_s in asked if now_s - since_s < START_S]
        speed = min(borne(name, num) for name, num in self.ready.items())
        wait_s = self.num_queued / max(speed, 1e-9)
        good = min(rate, speed) if self.refuses or wait_s <= 0.5 else 0.0
        if not self.refuses:
            self.num_queued = max(0.0, self.num_queued + (rate - speed) * TICK_S)
        self.num_asked += rate * TICK_S
        self.num_good += good * TICK_S
        self.pod_s += sum(self.replicas(name) for name in self.ready) * TICK_S

    def replicas(self, name: PoolName) -> int:
        return self.ready[name] + len(self.starting[name])

    def scale(self, now_s: float, wanted: dict[PoolName, int]) -> None:
        for name, num in wanted.items():
            change = num - self.replicas(name)
            if change:
                self.changes[name].append((now_s, change))
            self.starting[name] += [now_s] * max(0, change)
            for _ in range(-change):
                if self.starting[name]:
                    self.starting[name].pop()
                else:
                    self.ready[name] -= 1

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_asked


def by_policy(policy: Policy) -> Scaler:
    def decide(mesh: Mesh, now_s: float, rate: float) -> dict[PoolName, int]:
        pools = tuple(
            view(name, mesh.ready[name], starting_ages_s=tuple(now_s - since_s for since_s in mesh.starting[name]))
            for name in (PREFILL, DECODE)
        )
        seen = Traffic(rate, LENGTHS, window_s=WINDOW_S, num_queued=int(mesh.num_queued))
        decision = policy.decide(Snapshot(now_s, seen, pools))
        for flip in decision.flips:
            mesh.ready[flip.giver] -= flip.num
            mesh.ready[flip.taker] += flip.num
        return {name: decision.replicas(name) for name in (PREFILL, DECODE)}

    return decide


def run(rates: Callable[[float], float], seconds: float, scaler: Scaler, mesh: Mesh, seed: int = 0) -> Mesh:
    """Observed rates are counts of independent arrivals in a window."""
    rng = random.Random(seed)
    for number in range(int(seconds / TICK_S)):
        now_s = number * TICK_S
        rate = rates(now_s)
        mesh.serve(now_s, rate)
        observed = max(0.0, rng.gauss(rate, math.sqrt(rate / WINDOW_S)))
        mesh.scale(now_s, scaler(mesh, now_s, observed))
    return mesh


def oracle_pod_s(rates: Callable[[float], float], seconds: float) -> float:
    """Of one that knows the future: each pod is asked for just in time, a start before it is needed, and goes at once."""
    times = [number * TICK_S for number in range(int(seconds / TICK_S) + 1)]
    total = 0.0
    for name in (PREFILL, DECODE):
        numbers = [needed(name, round(rates(time_s), 1)) for time_s in times]
        ahead = int(START_S / TICK_S)
        total += sum(max(numbers[index : index + ahead + 1]) for index in range(len(times) - 1)) * TICK_S
    return total
