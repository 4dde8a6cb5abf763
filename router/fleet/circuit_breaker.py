"""Circuit breakers: workers are ejected for a while when they fail, or are far slower than their peers.

    CLOSED ── errors or slowness ─► OPEN, for a time that grows ─► HALF_OPEN, one request is let through ─┬─ good ─► CLOSED
                                     ▲                                                                    └─ bad ──► OPEN
                                     └──────────────── longer, up to `max_ejection_s` ◄──────────────────────────────────┘

A breaker belongs to one incarnation of a worker in one role: a restarted worker begins anew. Errors decay exponentially, so that
one error in a hundred requests ejects no worker and the first three in a row do. Slowness is compared with the median of the
peers: when all are slow, none is ejected. At most `max_share` of the peers are ejected, and never the last. `CircuitBreaker` is
pure: time is passed in.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pdmesh.v1 import mesh_pb2, worker_pb2
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot

MAX_BREAKERS = 10_000
"""Bounds the breakers: no event says that a worker is gone for good, so beyond this number the one that was unused for longest is
dropped."""


class Role(enum.Enum):
    """Name the role in which a worker is judged: one that prefills badly may decode well."""

    PREFILL = "prefill"
    DECODE = "decode"


class State(enum.Enum):
    """Name the state of a breaker. HALF_OPEN: the ejection is over, and one request probes the worker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True)
class HealthLimits:
    """Hold when a worker is ejected, and for how long. Times are seconds."""

    min_errors: float = 2.5  # decayed number of errors below which the share does not count: slightly less than three in a row
    error_share: float = 0.5
    memory_s: float = 10.0  # an error of this age weighs 1/e
    slow_factor: float = 4.0  # times the median of the peers
    slow_step_s: float = 0.005  # a decode step up to that is never too slow: of shorter ones a busy machine makes multiples
    min_samples: float = 4.0  # decayed number of measurements below which a worker is neither called slow nor compared with
    ejection_s: float = 2.0  # the first ejection; each further one takes twice as long
    max_ejection_s: float = 60.0
    jitter: float = 0.25  # a random share up to this is added, so that workers do not come back all at once
    probe_s: float = 10.0  # another probe is sent if one has not ended by then
    max_share: float = 0.5
    loss_s: float = 1.0  # the requests that a lost worker had say so within this time of each other


@dataclass(eq=False)
class Breaker:
    """Hold one worker in one role. `times`: ejections without a long healthy period in between; `num_ejections`: all ejections.
    `reason`: why the state last changed; `has_failed`: it was last opened by failures, not by slowness."""

    state: State = State.CLOSED
    errors: float = 0.0
    successes: float = 0.0
    slowness: float = 0.0
    samples: float = 0.0
    times: int = 0
    opened_at: float = 0.0
    until: float = 0.0  # OPEN: the end of the ejection; HALF_OPEN: the time limit of the probe
    touched_at: float = 0.0
    num_ejections: int = 0
    reason: str = ""
    has_failed: bool = False
    lost_at: float = -math.inf

    def fade(self, now: float, memory_s: float) -> None:
        """Decay the counts to the time `now`."""
        weight = math.exp(-max(0.0, now - self.touched_at) / memory_s)
        self.errors, self.successes, self.samples = self.errors * weight, self.successes * weight, self.samples * weight
        self.touched_at = now


@dataclass(eq=False)
class CircuitBreaker:
    """Hold all breakers of a router. `jitter` returns a number in [0, 1); `on_change` is called with (worker, role, state,
    reason)."""

    limits: HealthLimits = field(default_factory=HealthLimits)
    jitter: Callable[[], float] = lambda: 0.5
    on_change: Callable[[WorkerKey, Role, State, str], None] = lambda _worker, _role, _state, _reason: None
    _breakers: dict[tuple[WorkerKey, Role], Breaker] = field(default_factory=dict)
    _suspects: set[tuple[WorkerKey, Role]] = field(default_factory=set)

    @property
    def suspects(self) -> bool:
        """Return whether any breaker is not CLOSED."""
        return bool(self._suspects)

    def suspects_of(self, role: Role) -> list[WorkerKey]:
        """Return the workers whose breaker in this role is not CLOSED."""
        return [worker for worker, judged in self._suspects if judged is role]

    def failing(self, role: Role) -> list[WorkerKey]:
        """Return the workers whose breaker in this role is not CLOSED because requests failed there, not as they are slow."""
        suspects = ((worker, self._breakers.get((worker, role))) for worker in self.suspects_of(role))
        return [worker for worker, breaker in suspects if breaker is not None and breaker.has_failed]

    def breaker(self, worker: WorkerKey, role: Role) -> Breaker | None:
        """Return the breaker as of the worker's last result; None when there was none, or a long time ago."""
        return self._breakers.get((worker, role))

    def state(self, worker: WorkerKey, role: Role) -> State:
        """Return the breaker's state; unknown workers are CLOSED."""
        breaker = self.breaker(worker, role)
        return State.CLOSED if breaker is None else breaker.state

    def succeeded(self, worker: WorkerKey, role: Role, now: float) -> None:
        """Record a success."""
        breaker = self._touch(worker, role, now)
        breaker.successes += 1
        if breaker.state is State.HALF_OPEN:
            self._close(worker, role, breaker)
        elif breaker.state is State.CLOSED and now - breaker.until > self.limits.max_ejection_s:
            breaker.times = 0

    def failed(self, worker: WorkerKey, role: Role, now: float, reason: str, *, lost: bool = False) -> None:
        """Record a failure that the request did not cause. `lost`: the worker was lost, which is one failure, however many
        requests it costs."""
        breaker = self._touch(worker, role, now)
        if lost and breaker.state is not State.HALF_OPEN and now - breaker.lost_at < self.limits.loss_s:
            return
        if lost:
            breaker.lost_at = now
        breaker.errors += 1
        share = breaker.errors / (breaker.errors + breaker.successes)
        if breaker.state is not State.OPEN:
            breaker.has_failed = True
        if breaker.state is State.HALF_OPEN:
            self._open(worker, role, breaker, now, f"its probe failed: {reason}")
        elif breaker.state is State.CLOSED and breaker.errors >= self.limits.min_errors and share >= self.limits.error_share:
            self._open(worker, role, breaker, now, f"{share:.0%} of its last requests failed, the last one so: {reason}")

    def measured(self, worker: WorkerKey, role: Role, slowness: float, peers: Iterable[WorkerKey], now: float) -> None:
        """Record how slow the worker was: prompts in observed ÷ expected time, decode in seconds of a step."""
        breaker = self._touch(worker, role, now)
        breaker.slowness += (slowness - breaker.slowness) * (1 / min(8.0, breaker.samples + 1))
        breaker.samples += 1
        usual = self._usual(worker, role, peers)
        if breaker.state is not State.CLOSED or usual is None or breaker.samples < self.limits.min_samples:
            return
        least = self.limits.slow_step_s if role is Role.DECODE else 0.0
        if breaker.slowness > max(least, self.limits.slow_factor * usual):
            reason = f"{breaker.slowness / usual:.1f} times slower than its peers"
            breaker.samples = breaker.slowness = 0.0  # measurements start anew after the ejection
            breaker.has_failed = False
            self._open(worker, role, breaker, now, reason)

    def chosen(self, worker: WorkerKey, role: Role, now: float) -> None:
        """Record that a request is sent to the worker; after an ejection it is the probe."""
        breaker = self._breakers.get((worker, role))
        if breaker is not None and breaker.state is not State.CLOSED and now >= breaker.until:
            breaker.until = now + self.limits.probe_s
            if breaker.state is State.OPEN:
                self._change(worker, role, breaker, State.HALF_OPEN, "one request goes there")

    def ejected(self, role: Role, peers: Sequence[WorkerKey], now: float) -> frozenset[WorkerKey]:
        """Return the `peers`, all of one kind, that are ejected now; if they are too many, those that were ejected first."""
        found = [(breaker.opened_at, peer) for peer in peers if (breaker := self._left_out(peer, role, now)) is not None]
        most = min(int(len(peers) * self.limits.max_share), len(peers) - 1)
        return frozenset(peer for _, peer in sorted(found)[: max(0, most)])

    def _left_out(self, worker: WorkerKey, role: Role, now: float) -> Breaker | None:
        breaker = self._breakers.get((worker, role))
        return breaker if breaker is not None and breaker.state is not State.CLOSED and now < breaker.until else None

    def _usual(self, worker: WorkerKey, role: Role, peers: Iterable[WorkerKey]) -> float | None:
        """Return the median slowness of the other peers; None when too few were measured."""
        known = [
            breaker.slowness
            for peer in peers
            if peer != worker
            and (breaker := self._breakers.get((peer, role))) is not None
            and breaker.samples >= self.limits.min_samples
        ]
        return statistics.median(known) if known else None

    def _open(self, worker: WorkerKey, role: Role, breaker: Breaker, now: float, reason: str) -> None:
        self._suspects.add((worker, role))
        growing_s = self.limits.ejection_s * 2.0 ** min(breaker.times, 20)
        breaker.times += 1
        breaker.num_ejections += 1
        breaker.opened_at = now
        breaker.until = now + min(growing_s, self.limits.max_ejection_s) * (1 + self.limits.jitter * self.jitter())
        self._change(worker, role, breaker, State.OPEN, f"ejected for {breaker.until - now:.1f} s: {reason}")

    def _close(self, worker: WorkerKey, role: Role, breaker: Breaker) -> None:
        self._suspects.discard((worker, role))
        breaker.errors = 0.0
        self._change(worker, role, breaker, State.CLOSED, "its probe went well")

    def _change(self, worker: WorkerKey, role: Role, breaker: Breaker, state: State, reason: str) -> None:
        breaker.state, breaker.reason = state, reason
        self.on_change(worker, role, state, reason)

    def _touch(self, worker: WorkerKey, role: Role, now: float) -> Breaker:
        key = (worker, role)
        breaker = self._breakers.pop(key, None) or Breaker(touched_at=now)
        breaker.fade(now, self.limits.memory_s)
        self._breakers[key] = breaker  # at the end: the dict is in the order of last use
        if len(self._breakers) > MAX_BREAKERS:
            oldest = next(iter(self._breakers))
            del self._breakers[oldest]
            self._suspects.discard(oldest)
        return breaker


# The health recorder: results of requests, for the circuit breaker, with this process's clock and log.

PEERS_FOR_S = 2.0
"""Seconds for which a list of peers is reused for comparisons: making one reads every worker."""

logger = logging.getLogger(__name__)


class HealthRecorder:
    """Take results of requests from all callers, and tell the placer which workers are ejected."""

    def __init__(
        self,
        views: Callable[[], Iterable[WorkerSnapshot]],
        silent: Callable[[], frozenset[WorkerKey]] = frozenset,
    ) -> None:
        """Create the recorder. `views` returns the current workers, `silent` those that have been silent for a while."""
        self.health = CircuitBreaker(jitter=random.random, on_change=_log)
        self._views = views
        self._silent = silent
        self._peers: dict[tuple[WorkerKey, Role], Iterable[WorkerKey]] = {}
        self._peers_until = 0.0

    @property
    def leaves_any_out(self) -> bool:
        """Return whether `left_out` may return any worker."""
        return self.health.suspects or bool(self._silent())

    def left_out(self, fleet_snapshot: FleetSnapshot, role: Role) -> frozenset[WorkerKey]:
        """Return the workers that get nothing while there are others: the ejected ones, and those that are silent, but for a kind
        of which all others are left out."""
        ejected, silent = self.ejected(fleet_snapshot, role), self._silent()
        if not silent:
            return ejected
        estimates = (fleet_snapshot.get(address) for address, _ in silent)
        views = [estimate.view for estimate in estimates if estimate is not None]
        out = ejected
        for suspects in _by_kind(views, role):
            peers = fleet_snapshot.peers(next(iter(suspects.values())), prefill=role is Role.PREFILL)
            if any(peer.key not in silent and peer.key not in ejected for peer in peers):
                out |= frozenset(suspects)
        return out

    def ejected(self, fleet_snapshot: FleetSnapshot, role: Role) -> frozenset[WorkerKey]:
        """Return the workers that are ejected now in this role: of each kind at most a share, and never the last."""
        if not self.health.suspects:
            return frozenset()
        now = _now()
        estimates = (fleet_snapshot.get(address) for address, _ in self.health.suspects_of(role))
        views = [estimate.view for estimate in estimates if estimate is not None]
        peers = [self._with_peers(suspects, fleet_snapshot, role) for suspects in _by_kind(views, role)]
        return frozenset[WorkerKey]().union(*(self.health.ejected(role, each, now) for each in peers))

    def _with_peers(
        self, suspects: dict[WorkerKey, WorkerSnapshot], fleet_snapshot: FleetSnapshot, role: Role
    ) -> list[WorkerKey]:
        """Return the suspects with enough peers of their kind that more would not change the result: there may be thousands of
        peers, and every request asks."""
        share = self.health.limits.max_share
        enough = math.ceil(len(suspects) / share) + 1 if share else None
        peers = fleet_snapshot.peers(next(iter(suspects.values())), prefill=role is Role.PREFILL)
        return list(suspects | {peer.key: peer for peer in islice(peers, enough)})

    def chosen(self, worker: WorkerKey, role: Role) -> None:
        """Record that a request is sent to the worker."""
        self.health.chosen(worker, role, _now())

    def succeeded(self, worker: WorkerKey, role: Role) -> None:
        """Record that the worker did its part of a request."""
        self.health.succeeded(worker, role, _now())

    def took(self, worker: WorkerKey, role: Role, slowness: float) -> None:
        """Record how slow the worker was: prompts in observed ÷ expected time, decode in seconds of a step."""
        self.health.measured(worker, role, slowness, self._peers_of(worker, role), _now())

    def failed(self, worker: WorkerKey, role: Role, reason: str, *, lost: bool = False) -> None:
        """Record that the worker failed its part of a request, and that the request did not cause it. `lost`: because the worker
        was lost, with all that it had."""
        self.health.failed(worker, role, _now(), reason, lost=lost)

    def _peers_of(self, worker: WorkerKey, role: Role) -> Iterable[WorkerKey]:
        now = _now()
        if now >= self._peers_until:
            views = list(self._views())
            self._peers = {(key, each): peers for each in Role for peers in _by_kind(views, each) for key in peers}
            self._peers_until = now + PEERS_FOR_S
        return self._peers.get((worker, role), ())


def _by_kind(views: Iterable[WorkerSnapshot], role: Role) -> list[dict[WorkerKey, WorkerSnapshot]]:
    """Return the workers of each kind: they can replace each other."""
    kinds: dict[tuple[object, ...], dict[WorkerKey, WorkerSnapshot]] = defaultdict(dict)
    for view in views:
        if view.decode if role is Role.DECODE else view.prefill:
            kinds[view.kind][view.key] = view
    return list(kinds.values())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _log(worker: WorkerKey, role: Role, state: State, reason: str) -> None:
    level = logging.WARNING if state is State.OPEN else logging.INFO
    logger.log(level, "%s worker %s (epoch %016x) is %s: %s", role.value, worker[0], worker[1], state.value, reason)


# Breakers as messages, for the status.

MAX_REASON_CHARS = 200
_ROLES = {Role.PREFILL: worker_pb2.ROLE_PREFILL, Role.DECODE: worker_pb2.ROLE_DECODE}
_STATES = {
    State.CLOSED: mesh_pb2.BREAKER_STATE_CLOSED,
    State.OPEN: mesh_pb2.BREAKER_STATE_OPEN,
    State.HALF_OPEN: mesh_pb2.BREAKER_STATE_HALF_OPEN,
}


class BreakerStatuses:
    """Read the breakers at one moment: ejected workers are computed once for all of them."""

    def __init__(self, health_recorder: HealthRecorder, fleet_snapshot: FleetSnapshot, now: float) -> None:
        """Compute the ejected workers. `now` is monotonic seconds."""
        self._health_recorder = health_recorder
        self._left_out: Mapping[Role, frozenset[WorkerKey]] = {
            role: health_recorder.ejected(fleet_snapshot, role) for role in Role
        }
        self._now = now

    def of(self, worker: WorkerKey) -> list[mesh_pb2.BreakerStatus]:
        """Return the breakers of the roles in which the worker was ever ejected."""
        breakers = ((role, self._health_recorder.health.breaker(worker, role)) for role in Role)
        return [self._status(worker, role, each) for role, each in breakers if each is not None and each.num_ejections]

    def _status(self, worker: WorkerKey, role: Role, breaker: Breaker) -> mesh_pb2.BreakerStatus:
        left_s = 0.0 if breaker.state is State.CLOSED else max(0.0, breaker.until - self._now)
        return mesh_pb2.BreakerStatus(
            role=_ROLES[role],
            state=_STATES[breaker.state],
            left_out=worker in self._left_out[role],
            left_ms=round(left_s * 1000),
            num_ejections=breaker.num_ejections,
            reason=breaker.reason[:MAX_REASON_CHARS],
        )
