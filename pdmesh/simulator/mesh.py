"""The simulated mesh: routers, workers that start, drain, change roles and die, and arrivals.

mesh = Mesh(MeshSettings(...), results)
mesh.add_worker(spec, prefill=True, decode=False)
mesh.every(10.0, lambda: ...)          # an autoscaler reads `figures`, `counts`, and adds or drains
mesh.run(arrivals)
"""

import enum
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.routers.router import Router, goals
from pdmesh.simulator.routers.routing import SimulatedRouting
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers.kv_room import NO_CHANGES, CacheChanges
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.worker import Figures, ModelledWorker, figures_of

# Pods by pool, and their cost: the seconds of each from start to end.


PREFILL, DECODE, BOTH = POOLS = ("prefill", "decode", "both")


class Phase(enum.Enum):
    """Name a pod's phase: it starts (loads its model), serves, drains, and is gone."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True)
class PoolCounts:
    """Hold the current pods of one pool."""

    starting: int = 0
    ready: int = 0
    draining: int = 0


def pool_of(*, prefill: bool, decode: bool) -> str:
    """Return the pool of a worker with these roles. Raises ValueError without any."""
    if not (prefill or decode):
        raise ValueError("roles: a worker has at least one of prefill and decode")
    return BOTH if prefill and decode else PREFILL if prefill else DECODE


class PodTime:
    """Sum pod seconds by pool. `now` is simulated and never decreases."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = dict.fromkeys(POOLS, 0.0)
        self._num: dict[str, int] = dict.fromkeys(POOLS, 0)
        self._at = 0.0

    def come(self, pool: str, now: float) -> None:
        """Add a pod."""
        self._advance(now)
        self._num[pool] += 1

    def go(self, pool: str, now: float) -> None:
        """Remove a pod."""
        self._advance(now)
        self._num[pool] -= 1

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds of each pool until now."""
        self._advance(now)
        return dict(self._ended)

    def _advance(self, now: float) -> None:
        for pool, num in self._num.items():
            self._ended[pool] += num * (now - self._at)
        self._at = now


def counts_of(pods: Iterable[tuple[str, Phase]]) -> dict[str, PoolCounts]:
    """Return the counts of each pool, from (pool, phase) of its pods."""
    numbers = {(pool, phase): 0 for pool in POOLS for phase in Phase}
    for pod in pods:
        numbers[pod] += 1
    phases = (Phase.STARTING, Phase.READY, Phase.DRAINING)
    return {pool: PoolCounts(*(numbers[pool, phase] for phase in phases)) for pool in POOLS}


# One pod of the simulated mesh: a worker, its roles, and its phase.


@dataclass(eq=False, slots=True)
class Pod:
    """Hold a pod. Its roles are what routers may assign to it: it finishes the work that it has."""

    worker: ModelledWorker
    prefill: bool
    decode: bool
    phase: Phase = Phase.STARTING
    told_changes: int = -1
    told_phase: Phase = Phase.STARTING

    @property
    def pool(self) -> str:
        """Return the pool by its roles."""
        return pool_of(prefill=self.prefill, decode=self.decode)

    def figures(self, now: float) -> Figures:
        """Return what it reports at `now`."""
        is_draining = self.phase is Phase.DRAINING
        return figures_of(self.worker, now, prefill=self.prefill, decode=self.decode, draining=is_draining)

    def has_news(self) -> bool:
        """Return whether its report would differ from the previous one; call it once for each."""
        worker = self.worker
        before = (self.told_changes, self.told_phase)
        self.told_changes, self.told_phase = worker.num_changes, self.phase
        return worker.course is not None or before != (worker.num_changes, self.phase)


class Audience(Protocol):
    """Observe requests."""

    def arrived(self, request: Request) -> None:
        """Observe an arrival at a router."""

    def ended(self, request: Request, end: End, now: float) -> None:
        """Observe the end of a request, once for each."""


class Mesh:
    """Simulate the mesh. Deterministic: equal settings, calls and arrivals give equal events. Times are simulated seconds."""

    def __init__(self, settings: MeshSettings, audience: Audience, *, prefix_tokens: int = 512, seed: int = 0) -> None:
        """Create the mesh. `prefix_tokens`: the tokens of one prefix hash of the arrivals, as in the workers' `WorkerSpec`."""
        self.events = EventQueue()
        self._settings, self._audience, self._prefix_tokens = settings, audience, prefix_tokens
        self._rng, self._seed = random.Random(seed), seed
        self._pods: dict[str, Pod] = {}
        self._pod_time = PodTime()
        self._routers = [self._router() for _ in range(settings.num_routers)]
        self._live: dict[Request, None] = {}
        self._num_arrived = self._num_pods = 0
        self._is_fed = False
        self._largest = 0

    # Pods

    def add_worker(
        self, spec: WorkerSpec, *, prefill: bool, decode: bool, ready_after_s: float = 0.0, name: str | None = None
    ) -> str:
        """Start a pod that accepts work after `ready_after_s`; return its name. Raises ValueError."""
        pool = pool_of(prefill=prefill, decode=decode)
        name = name or f"{pool}-{self._num_pods}"
        if name in self._pods:
            raise ValueError(f"name: {name} is taken")
        self._num_pods += 1
        self._largest = max(self._largest, spec.largest)
        pod = self._pods[name] = Pod(self._worker(name, spec), prefill, decode)
        self._pod_time.come(pool, self.events.now)
        if ready_after_s:
            self.events.after(ready_after_s, self._ready, pod)
        else:
            self._ready(pod)
        return name

    def _worker(self, name: str, spec: WorkerSpec) -> ModelledWorker:
        tiers = self._settings.tiers
        return ModelledWorker(name, spec, self.events, self._seed, 0.0 if tiers is None else tiers.num_bytes)

    def drain_worker(self, name: str) -> None:
        """Drain a worker: it accepts no new work, finishes its own, and ends. Raises KeyError for an unknown name."""
        pod = self._pods[name]
        if pod.phase is Phase.STARTING:
            self._remove(pod)
        else:
            pod.phase = Phase.DRAINING

    def lose_worker(self, name: str) -> None:
        """Kill a worker; routers notice after `loss_notice_s` and place its requests elsewhere. Raises KeyError."""
        pod = self._pods[name]
        pod.worker.stop(self.events.now)
        self._remove(pod)

    def set_roles(self, name: str, *, prefill: bool, decode: bool) -> None:
        """Set the roles: it accepts this kind of work from now on, and finishes its own. Raises KeyError, ValueError."""
        pod, pool = self._pods[name], pool_of(prefill=prefill, decode=decode)
        self._pod_time.go(pod.pool, self.events.now)
        pod.prefill, pod.decode = prefill, decode
        pod.worker.num_changes += 1
        self._pod_time.come(pool, self.events.now)

    def counts(self) -> dict[str, PoolCounts]:
        """Return the pods by pool."""
        return counts_of((pod.pool, pod.phase) for pod in self._pods.values())

    def pod_seconds(self) -> dict[str, float]:
        """Return the pod seconds by pool, of all pods so far."""
        return self._pod_time.seconds(self.events.now)

    def figures(self) -> Mapping[str, Figures]:
        """Return the current figures of each worker that is ready or drains, by name."""
        return {name: pod.figures(self.events.now) for name, pod in self._pods.items() if pod.phase is not Phase.STARTING}

    def worker(self, name: str) -> ModelledWorker | None:
        """Return the worker of that name, if it exists and has started."""
        pod = self._pods.get(name)
        return None if pod is None or pod.phase is Phase.STARTING else pod.worker

    def takes_work(self, name: str) -> bool:
        """Return whether it lives and does not drain."""
        pod = self._pods.get(name)
        return pod is not None and pod.phase is Phase.READY

    # Time

    @property
    def num_live(self) -> int:
        """Return the number of running requests."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Return how many of those wait at routers: for admission, or for capacity on a worker."""
        return sum(router.num_waiting for router in self._routers)

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        """Call the action every `period_s`, first after one period."""

        def again() -> None:
            action()
            self.events.after(period_s, again)

        self.events.after(period_s, again)

    def run(self, arrivals: Iterable[Arrival], until_s: float | None = None) -> None:
        """Run until all arrivals have ended, or until `until_s`: then the running ones are lost."""
        source = iter(arrivals)
        self._is_fed = True
        self._feed(source)
        if self._is_fed:
            self.events.run(until_s)
        for request in list(self._live):
            request.reason = "unfinished"
            self._ended(request, End.LOST)

    def check(self) -> None:
        """Raise AssertionError unless the mesh is idle and no resource is held."""
        assert not self._live, f"{len(self._live)} requests are under way"
        for name, pod in self._pods.items():
            assert pod.worker.is_empty, f"{name} holds something"
            pod.worker.room.check(())

    # Inside

    def _router(self) -> Router:
        outlook = SimulatedRouting(self._settings, self._prefix_tokens)
        return Router(self.events, self._settings, outlook, self, self._ended)

    def _feed(self, source: Iterator[Arrival]) -> None:
        """Schedule one arrival ahead: there may be millions."""
        arrival = next(source, None)
        if arrival is None:
            self._is_fed = False
        else:
            self.events.at(max(self.events.now, arrival.at_s), self._arrive, arrival, source)

    def _arrive(self, arrival: Arrival, source: Iterator[Arrival]) -> None:
        self._feed(source)
        request = self._request(arrival)
        self._live[request] = None
        self._audience.arrived(request)
        router = self._routers[self._num_arrived % len(self._routers)]
        self._num_arrived += 1
        self.events.after(self._settings.router_s, router.arrive, request)

    def _request(self, arrival: Arrival) -> Request:
        """Return the request. Its output is cut to what a worker can hold; the policy rejects a prompt that is too long."""
        ttft_s, tpot_s = goals(self._settings, arrival.priority)
        num_output = max(1, min(arrival.num_output, self._largest - arrival.num_input))
        return Request(self._num_arrived, arrival, arrival.num_input, num_output, ttft_s, tpot_s)

    def _ended(self, request: Request, end: End) -> None:
        del self._live[request]
        self._audience.ended(request, end, self.events.now)
        if not self._live and not self._is_fed:
            self.events.stop()

    def _ready(self, pod: Pod) -> None:
        if pod.phase is not Phase.STARTING:
            return
        pod.phase = Phase.READY
        for router in self._routers:
            router.outlook.meet(pod.worker.name, pod.worker.spec)
            self._deliver(router, pod, pod.figures(self.events.now), NO_CHANGES)
        self.events.after(self._rng.random() * self._period_s(pod), self._report, pod)

    def _report(self, pod: Pod) -> None:
        """Report to all routers; not while nothing has changed."""
        if pod.phase is Phase.GONE:
            return
        if pod.phase is Phase.DRAINING and pod.worker.is_empty:
            self._remove(pod)
            return
        is_news = pod.has_news()
        routers = [router for router in self._routers if is_news or not router.outlook.is_settled(pod.worker.name)]
        if routers:
            figures, changes = pod.figures(self.events.now), pod.worker.room.take_changes()
            for router in routers:
                self.events.after(self._settings.report_delay_s, self._deliver, router, pod, figures, changes)
        self.events.after(self._period_s(pod), self._report, pod)

    def _deliver(self, router: Router, pod: Pod, figures: Figures, changes: CacheChanges) -> None:
        if pod.phase is not Phase.GONE:
            router.outlook.report(pod.worker.name, figures)
            router.outlook.told(pod.worker.name, changes)
            router.opened()

    def _period_s(self, pod: Pod) -> float:
        return self._settings.decode_report_period_s if pod.decode else self._settings.report_period_s

    def _remove(self, pod: Pod) -> None:
        self._pod_time.go(pod.pool, self.events.now)
        was_idle, pod.phase = pod.worker.is_empty, Phase.GONE
        del self._pods[pod.worker.name]
        delay_s = 0.0 if was_idle else self._settings.loss_notice_s
        for router in self._routers:
            self.events.after(delay_s, router.lost, pod.worker.name)
