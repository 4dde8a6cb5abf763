"""Simulates a mesh whose pools are scaled by the autoscaler's own policy, or another one.

  every period:  workers' figures, routers' counters ─► Seen ─► scaler ─► Wanted ─► role switches, starting and draining pods

What is seen is computed by the autoscaler's own code (`pdmesh/autoscaler/collect`), as in its loop.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from pdmesh.autoscaler.collect.traffic import Counts, Rounds, counts_of, total, traffic_of
from pdmesh.autoscaler.collect.workers import Pools, SeenWorker, Starts, idlest
from pdmesh.autoscaler.platform import Asked
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.policy.pool_plan import STUCK_STARTS
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import PoolName, Snapshot, Traffic
from pdmesh.planning.capacity_load import Goals, Limits
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.mesh import Audience, Mesh
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.routers.routing import EPOCH, MODEL
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.worker import Figures
from pdmesh.v1 import mesh_pb2
from router.flow_control.slo_admission import BATCH
from router.telemetry.traffic import ModelTraffic, Visit, traffic_status
from router.telemetry.traffic import Traffic as RouterTraffic

# The autoscaler's view of a simulated mesh: counted by `router/telemetry/traffic.py`, turned into figures by
# `pdmesh/autoscaler/collect`.
#
#     requests ─► a Traffic of each router ─► look: TrafficStatus ─► Rounds ─► traffic: rates, lengths, latencies of a window
#
# There is no network: every router answers every look at once.


class Watch:
    """Watch every request and pass it on. `look` is a round of the collector, at increasing times. It sets what each router
    `told`, the `counts` of all of them since the start, and the `traffic` of the latest window."""

    def __init__(self, audience: Audience, num_routers: int, window_s: float) -> None:
        self.counts = Counts()
        self._audience, self._window_s = audience, window_s
        self._routers = [RouterTraffic((MODEL,), 0.0) for _ in range(num_routers)]
        self._visits: dict[Request, Visit] = {}
        self._rounds = Rounds(2 * window_s)
        self.told: list[mesh_pb2.TrafficStatus] = []
        self.look(0.0)  # the first round is counted from here

    def arrived(self, request: Request) -> None:
        """Count an arrival at its router."""
        arrival = request.arrival
        is_batch = arrival.priority == BATCH
        self._visits[request] = self._router(request).arrive(request.num_input, arrival.at_s, is_batch=is_batch)
        self._audience.arrived(request)

    def ended(self, request: Request, end: End, now: float) -> None:
        """Count the end of a request."""
        visit, is_complete = self._visits.pop(request), end is End.COMPLETED
        if end is End.REFUSED:
            visit.refused()
        visit.ended(request.num_output if is_complete else request.num_emitted, request.num_cached)
        if is_complete:
            self._compare(request)
        self._audience.ended(request, end, now)

    def look(self, now: float) -> None:
        """Ask every router."""
        for request, visit in self._visits.items():
            if request.decided_at is not None:
                visit.placed()
        self.told = [told for router in self._routers for told in traffic_status(router, now)]
        counts = [counts_of(told) for told in self.told]
        for number, counted in enumerate(counts):
            self._rounds.heard(number, counted, now)
        self._rounds.close(now)
        self.counts = total(counts)

    def traffic(self, quantile: float) -> Traffic:
        """Return the traffic, from the second look on."""
        traffic = traffic_of(self._rounds.rounds, self.told, self._window_s, quantile, age_s=0.0)
        assert traffic is not None, "`look` was called once only"
        return replace(traffic, num_open=len(self._visits))

    def _router(self, request: Request) -> ModelTraffic:
        """Return the request's router: the mesh assigns requests round-robin."""
        return self._routers[request.number % len(self._routers)].of(MODEL)

    def _compare(self, request: Request) -> None:
        """Compare observed and predicted latency as `router/lifecycle/stages.py` does: for smooth requests, from the policy's
        decision on."""
        predicted, first_s, decided_s = request.prediction, request.first_at, request.decided_at
        if predicted is None or first_s is None or decided_s is None or request.num_resubmissions:
            return
        counted, tpot_s = self._router(request), request.tpot_s
        counted.ttft.add(first_s - decided_s, predicted.plain_ttft_s)
        if tpot_s:
            counted.tpot.add(tpot_s, predicted.tpot_s)


def seen_worker(name: str, figures: Figures, spec: WorkerSpec, now: float, *, pool: PoolName, home: PoolName) -> SeenWorker:
    """Return a worker as all routers report it."""
    return SeenWorker(
        worker_id=name,
        address=name,
        epoch=EPOCH,
        pool=pool,
        home=home,
        draining=figures.draining,
        num_busy=figures.num_running + figures.num_waiting + figures.num_reserved + figures.num_held,
        used_blocks=figures.num_total_blocks - figures.num_free_blocks,
        total_blocks=figures.num_total_blocks,
        reported_s=now,
        latency=spec.speed,
        limits=Limits(spec.max_num_batched_tokens, spec.max_num_seqs, spec.num_blocks * spec.block_size),
        keeps_pace=spec.keeps_pace,
        drafts=figures.drafts,
    )


ROLES = {PoolName.PREFILL: (True, False), PoolName.DECODE: (False, True), PoolName.BOTH: (True, True)}
SAMPLE_S = 1.0
"""Seconds between two samples of whether workers are busy."""


@dataclass(frozen=True)
class Seen:
    """Hold all that can be known at one moment. `busy`: share of the latest period in which a ready worker of the pool had a step
    under way; `num_waiting`: prompts that wait in the workers of the pool; `counts` of all routers so far."""

    snapshot: Snapshot
    counts: Counts
    busy: Mapping[PoolName, float]
    num_waiting: Mapping[PoolName, int]


@dataclass(frozen=True)
class Move:
    """Move `num` workers of one pool to the roles of the other."""

    giver: PoolName
    taker: PoolName
    num: int


@dataclass(frozen=True)
class Wanted:
    """Hold the wanted replicas by pool, the `moves` among them, and the reason."""

    replicas: Mapping[PoolName, int]
    moves: tuple[Move, ...] = ()
    reasons: Mapping[PoolName, str] = field(default_factory=dict)


class Scaler(Protocol):
    """Decide the number of replicas."""

    def decide(self, seen: Seen) -> Wanted:
        """Return the decision; called every period, with increasing times."""


class OwnScaler:
    """Scale by `pdmesh/autoscaler/policy/policy.py`."""

    def __init__(self, settings: AutoscalerSettings, goals: Goals) -> None:
        self.policy = Policy(settings, goals)

    def decide(self, seen: Seen) -> Wanted:
        """Return the policy's decision on the snapshot."""
        decision = self.policy.decide(seen.snapshot)
        return Wanted(
            {pool.name: pool.replicas for pool in decision.pools},
            tuple(Move(flip.giver, flip.taker, flip.num) for flip in decision.flips),
            {pool.name: pool.reason for pool in decision.pools},
        )


@dataclass(frozen=True)
class AutoscaledSettings:
    """Configure the scaling. `start_s`: from asking for a pod until it serves; `period_s` of decisions; `window_s` over which
    rates and latencies are measured, in whole periods."""

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
    """Record one period, for later analysis: pods by pool (ready, starting, draining), requests a second, changes and reasons."""

    at_s: float
    pods: Mapping[PoolName, tuple[int, int, int]]
    rate_per_s: float
    changes: Mapping[PoolName, int]
    moves: tuple[Move, ...]
    reasons: Mapping[PoolName, str]


@dataclass
class _Pod:
    """Hold a pod. `home`: the pool it was started for."""

    home: PoolName
    pool: PoolName
    asked_s: float
    is_draining: bool = False
    num_samples: int = 0
    num_busy: int = 0


class Autoscaled:
    """Run the autoscaled mesh; `specs` of each pool's workers. Deterministic, as the mesh is."""

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
        """Start pods that serve from the beginning."""
        for pool, num in replicas.items():
            self._add(pool, num, 0.0)

    def run(self, arrivals: Iterable[Arrival], until_s: float | None = None) -> None:
        """Run; see `Mesh.run`."""
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
        """Return the current view; call it once a period."""
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
        """Return how many were asked for; negative: how many are drained."""
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
        """Drain starting pods, the latest first; then those with the least work."""
        starting = sorted((name for name in live if not self.mesh.takes_work(name)), key=lambda name: -self._pods[name].asked_s)
        ready = sorted((name for name in live if self.mesh.takes_work(name)), key=self._work)
        for name in [*starting, *ready][:num]:
            self._pods[name].is_draining = True
            self.mesh.drain_worker(name)

    def _work(self, name: str) -> tuple[int, int, str]:
        """Return the tokens that it holds or has yet to compute."""
        worker = self.mesh.worker(name)
        return (0, 0, name) if worker is None else (len(worker.rows), worker.num_to_prefill, name)


def goals_of(objective: ModelObjective, transit_s: float = 0.0) -> Goals:
    """Return the objective as goals of capacity planning."""
    return Goals(objective.ttft_ms / 1e3, objective.tpot_ms / 1e3, objective.quantile, transit_s)


def reversals(moments: Iterable[Moment], cool_down_s: float) -> int:
    """Return the changes of a pool that reverse the previous one within a cool-down. Role switches count: they change pools
    too."""
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
    """Return the change of each pool, moves included."""
    changes = dict(moment.changes)
    for move in moment.moves:
        changes[move.giver] = changes.get(move.giver, 0) - move.num
        changes[move.taker] = changes.get(move.taker, 0) + move.num
    return changes


def _quantile(objective: ModelObjective | None) -> float:
    return 0.99 if objective is None else objective.quantile
