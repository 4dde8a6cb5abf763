"""A simulated mesh whose pools somebody scales: the autoscaler's own policy, or another.

every period:  workers' figures, routers' counters ─► Seen ─► scaler ─► Wanted ─► flips, pods that start, pods that drain

What is seen is reckoned by the autoscaler's own code (`autoscaler/collect_*.py`, `starts.py`), as its loop does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdmesh.autoscaler.collect.collect_counts import Counts
from pdmesh.autoscaler.collect.collect_pools import Pools, idlest
from pdmesh.autoscaler.collect.starts import Starts
from pdmesh.autoscaler.platform import Asked
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.policy.pool_plan import STUCK_STARTS
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import PoolName, Snapshot
from pdmesh.planning.capacity_load import Goals
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.autoscaling_watch import Watch, seen_worker
from pdmesh.simulator.mesh import Audience, Mesh
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.stats import Figures

ROLES = {PoolName.PREFILL: (True, False), PoolName.DECODE: (False, True), PoolName.BOTH: (True, True)}
SAMPLE_S = 1.0
"""How often it is looked whether workers are busy."""


@dataclass(frozen=True)
class Seen:
    """All that can be known at one moment. `busy`: share of the latest period in which a ready worker of the pool had a step
    under way; `num_waiting`: prompts that wait in the workers of the pool; `counts` of all routers so far."""

    snapshot: Snapshot
    counts: Counts
    busy: Mapping[PoolName, float]
    num_waiting: Mapping[PoolName, int]


@dataclass(frozen=True)
class Move:
    """So many workers of one pool take the roles of the other."""

    giver: PoolName
    taker: PoolName
    num: int


@dataclass(frozen=True)
class Wanted:
    """Replicas by pool, `moves` among them, and why."""

    replicas: Mapping[PoolName, int]
    moves: tuple[Move, ...] = ()
    reasons: Mapping[PoolName, str] = field(default_factory=dict)


class Scaler(Protocol):
    """Who decides how many."""

    def decide(self, seen: Seen) -> Wanted:
        """Called every period, with times that grow."""


class OwnScaler:
    """`autoscaler/policy.py`."""

    def __init__(self, settings: AutoscalerSettings, goals: Goals) -> None:
        self.policy = Policy(settings, goals)

    def decide(self, seen: Seen) -> Wanted:
        """What the policy makes of the snapshot."""
        decision = self.policy.decide(seen.snapshot)
        return Wanted(
            {pool.name: pool.replicas for pool in decision.pools},
            tuple(Move(flip.giver, flip.taker, flip.num) for flip in decision.flips),
            {pool.name: pool.reason for pool in decision.pools},
        )


@dataclass(frozen=True)
class AutoscaledSettings:
    """`start_s`: from asking for a pod until it serves; `period_s` of decisions; `window_s` over which rates and latencies are
    taken, in whole periods."""

    start_s: float = 60.0
    period_s: float = 5.0
    window_s: float = 15.0

    def __post_init__(self) -> None:
        if not (self.period_s > 0 and self.start_s >= 0):
            raise ValueError("period_s: must be positive, and start_s not negative")
        if not self.window_s >= self.period_s:
            raise ValueError(f"window_s: {self.window_s} is less than a period, {self.period_s}")


@dataclass(frozen=True)
class Moment:
    """Of one period, for those who look at a run later: pods by pool (ready, starting, draining), requests a second, what
    changed and why."""

    at_s: float
    pods: Mapping[PoolName, tuple[int, int, int]]
    rate_per_s: float
    changes: Mapping[PoolName, int]
    moves: tuple[Move, ...]
    reasons: Mapping[PoolName, str]


@dataclass
class _Pod:
    """`home`: the pool it was started for."""

    home: PoolName
    pool: PoolName
    asked_s: float
    is_draining: bool = False
    num_samples: int = 0
    num_busy: int = 0


class Autoscaled:
    """`specs`: of each pool's workers. Deterministic, as the mesh is."""

    def __init__(
        self,
        mesh_settings: MeshSettings,
        audience: Audience,
        specs: Mapping[PoolName, WorkerSpec],
        scaler: Scaler,
        settings: AutoscaledSettings | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.settings = settings or AutoscaledSettings()
        self.watch = Watch(audience, mesh_settings.num_routers, self.settings.window_s)
        prefix_tokens = next(iter(specs.values())).prefix_tokens
        self.mesh = Mesh(mesh_settings, self.watch, prefix_tokens=prefix_tokens, seed=seed)
        self.moments: list[Moment] = []
        self._specs, self._scaler, self._quantile = specs, scaler, _quantile(mesh_settings.objective)
        self._pods: dict[str, _Pod] = {}
        self._starts = {pool: Starts(STUCK_STARTS * self.settings.start_s) for pool in specs}

    def start(self, replicas: Mapping[PoolName, int]) -> None:
        """Pods that serve from the beginning."""
        for pool, num in replicas.items():
            self._add(pool, num, 0.0)

    def run(self, arrivals: Iterable[Arrival], until_s: float | None = None) -> None:
        """As `Mesh.run`."""
        self.mesh.every(SAMPLE_S, self._sample)
        self.mesh.every(self.settings.period_s, self._scale)
        self.mesh.run(arrivals, until_s)

    # Looking

    def _sample(self) -> None:
        for name, pod in self._pods.items():
            worker = self.mesh.worker(name)
            if worker is not None:
                pod.num_samples += 1
                pod.num_busy += worker.course is not None

    def seen(self) -> Seen:
        """What is known now; to be asked once a period."""
        now, figures = self.mesh.events.now, self.mesh.figures()
        self._forget_gone(figures, now)
        self.watch.look(now)
        pools = self._pools(figures, now)
        pools.follow(self._starts, now)
        snapshot = Snapshot(now, self.watch.traffic(self._quantile), pools.views(self._starts, now, now))
        busy = {pool: self._busy(pool) for pool in self._specs}
        waiting = {pool: sum(figures[name].num_waiting for name in self._ready(pool)) for pool in self._specs}
        return Seen(snapshot, self.watch.counts, busy, waiting)

    def _forget_gone(self, figures: Mapping[str, Figures], now: float) -> None:
        for name, pod in list(self._pods.items()):
            if name not in figures and (pod.is_draining or now > pod.asked_s + self.settings.start_s):
                del self._pods[name]

    def _pools(self, figures: Mapping[str, Figures], now: float) -> Pools:
        asked = {pool: sum(pod.home is pool and not pod.is_draining for pod in self._pods.values()) for pool in self._specs}
        workers = tuple(
            seen_worker(name, figures[name], self._specs[pod.home], now, pool=pod.pool, home=pod.home)
            for name, pod in self._pods.items()
            if name in figures
        )
        return Pools({pool: Asked(replicas) for pool, replicas in asked.items()}, workers)

    def _ready(self, pool: PoolName) -> list[str]:
        return [name for name, pod in self._pods.items() if pod.pool is pool and self.mesh.takes_work(name)]

    def _busy(self, pool: PoolName) -> float:
        pods = [self._pods[name] for name in self._ready(pool)]
        samples = sum(pod.num_samples for pod in pods)
        return sum(pod.num_busy for pod in pods) / samples if samples else 0.0

    # Acting

    def _scale(self) -> None:
        seen = self.seen()
        wanted = self._scaler.decide(seen)
        for move in wanted.moves:
            self._move(move)
        changes = {pool: self._resize(pool, wanted.replicas[pool]) for pool in self._specs}
        pods = {view.name: (view.num_ready, len(view.starting_ages_s), view.num_draining) for view in seen.snapshot.pools}
        rate = seen.snapshot.traffic.rate_per_s
        self.moments.append(Moment(seen.snapshot.now_s, pods, rate, changes, wanted.moves, wanted.reasons))
        for pod in self._pods.values():
            pod.num_samples = pod.num_busy = 0

    def _move(self, move: Move) -> None:
        prefill, decode = ROLES[move.taker]
        pools = self._pools(self.mesh.figures(), self.mesh.events.now)
        for worker in idlest(pools.here(move.giver), move.taker, move.num):
            self._pods[worker.worker_id].pool = move.taker
            self.mesh.set_roles(worker.worker_id, prefill=prefill, decode=decode)

    def _resize(self, pool: PoolName, replicas: int) -> int:
        """Returns how many were asked for, or below zero how many go."""
        live = [name for name, pod in self._pods.items() if pod.pool is pool and not pod.is_draining]
        change = replicas - len(live)
        if change > 0:
            self._add(pool, change, self.settings.start_s)
        elif change < 0:
            self._drain(live, -change)
        return change

    def _add(self, pool: PoolName, num: int, ready_after_s: float) -> None:
        prefill, decode = ROLES[pool]
        for _ in range(num):
            name = self.mesh.add_worker(self._specs[pool], prefill=prefill, decode=decode, ready_after_s=ready_after_s)
            self._pods[name] = _Pod(pool, pool, self.mesh.events.now - (0.0 if ready_after_s else self.settings.start_s))

    def _drain(self, live: list[str], num: int) -> None:
        """Those that start, the latest first; then those with the least to do."""
        starting = sorted((name for name in live if not self.mesh.takes_work(name)), key=lambda name: -self._pods[name].asked_s)
        ready = sorted((name for name in live if self.mesh.takes_work(name)), key=self._work)
        for name in [*starting, *ready][:num]:
            self._pods[name].is_draining = True
            self.mesh.drain_worker(name)

    def _work(self, name: str) -> tuple[int, int, str]:
        """Tokens that it holds or is yet to compute."""
        worker = self.mesh.worker(name)
        return (0, 0, name) if worker is None else (len(worker.rows), worker.num_to_prefill, name)


def goals_of(objective: ModelObjective, transit_s: float = 0.0) -> Goals:
    """What the capacity arithmetic calls them."""
    return Goals(objective.ttft_ms / 1e3, objective.tpot_ms / 1e3, objective.quantile, transit_s)


def reversals(moments: Iterable[Moment], cool_down_s: float) -> int:
    """Changes of a pool that turn the one before round within a cool-down. Flips count: they change pools too."""
    latest: dict[PoolName, tuple[float, int]] = {}
    found = 0
    for moment in moments:
        for pool, change in net_changes(moment).items():
            if not change:
                continue
            sign = 1 if change > 0 else -1
            before = latest.get(pool)
            found += before is not None and before[1] == -sign and moment.at_s - before[0] < cool_down_s
            latest[pool] = (moment.at_s, sign)
    return found


def net_changes(moment: Moment) -> dict[PoolName, int]:
    """Of each pool, with what was moved."""
    changes = dict(moment.changes)
    for move in moment.moves:
        changes[move.giver] = changes.get(move.giver, 0) - move.num
        changes[move.taker] = changes.get(move.taker, 0) + move.num
    return changes


def _quantile(objective: ModelObjective | None) -> float:
    return 0.99 if objective is None else objective.quantile
