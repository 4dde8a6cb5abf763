"""What this router remembers of its placements: the latest decisions, with predicted and observed times, and the last workers of
each session. Bounded; of prompts only the lengths are kept."""

import heapq
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from pdmesh.v1 import mesh_pb2
from router.routing.filters import Placement, RoutingRequest
from router.routing.worker_snapshot import Mode, WorkerKey
from router.telemetry.timings import RequestTimings
from router.tokenization.prepared_request import PreparedRequest

MAX_DECISIONS = 1024
MAX_COMPARED = 512


@dataclass(frozen=True, eq=False, slots=True)
class Decision:
    """Hold one decision. `made_ns`: monotonic; `decision_ns`: its duration; `cached_tokens`: of the candidates only, by worker;
    `session_workers`: those on which the request's session was last.

    Observed times are read from the request's own `timings` on demand."""

    request_id: str
    policy: str
    made_ns: int
    decision_ns: int
    num_tokens: int
    num_workers: int
    placement: Placement
    cached_tokens: Mapping[WorkerKey, int]
    timings: RequestTimings | None = None
    session_workers: tuple[WorkerKey, ...] = ()

    @property
    def observed_ttft_s(self) -> float | None:
        """Return the seconds from the decision to the first token; None before it, and for a decision made after it."""
        first_ns = self.timings.first_received_ns if self.timings is not None else None
        return None if first_ns is None or first_ns < self.made_ns else (first_ns - self.made_ns) / 1e9

    @property
    def observed_tpot_s(self) -> float | None:
        """Return the request's TPOT once it has ended; None before, and with fewer than two tokens."""
        tpot_ns = self.timings.parts.tpot_ns if self.timings is not None else 0
        return tpot_ns / 1e9 if tpot_ns else None


class Decisions:
    """Keep the latest decisions in a ring, and the prediction errors of requests that have ended."""

    def __init__(self, max_decisions: int = MAX_DECISIONS) -> None:
        self._ring: deque[Decision] = deque(maxlen=max_decisions)
        self._ttft_errors: deque[float] = deque(maxlen=MAX_COMPARED)  # signed; positive: predicted too long
        self._tpot_errors: deque[float] = deque(maxlen=MAX_COMPARED)
        self._num_compared = 0
        self.counts: Counter[tuple[str, Mode]] = Counter()  # of all decisions, by policy and mode

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def capacity(self) -> int:
        """Return how many decisions are kept."""
        return self._ring.maxlen or 0

    def record(self, decision: Decision) -> None:
        """Keep a decision in place of the oldest."""
        self._ring.append(decision)
        self.counts[decision.policy, decision.placement.mode] += 1

    def latest(self, count: int) -> list[Decision]:
        """Return up to `count` decisions, the newest first."""
        return [self._ring[-number] for number in range(1, min(count, len(self._ring)) + 1)]

    def of_request(self, request_id: str) -> list[Decision]:
        """Return the decisions with this id, the newest first. Clients choose ids, so several requests may share one."""
        return [decision for decision in reversed(self._ring) if decision.request_id == request_id]

    def compare(self, decision: Decision) -> None:
        """Record the prediction error of a decision whose request has ended."""
        chosen, ttft_s, tpot_s = decision.placement.chosen, decision.observed_ttft_s, decision.observed_tpot_s
        if chosen is None or chosen.prediction is None or not ttft_s:
            return
        self._num_compared += 1
        self._ttft_errors.append((chosen.prediction.ttft_s - ttft_s) / ttft_s)
        if tpot_s:
            self._tpot_errors.append((chosen.prediction.tpot_s - tpot_s) / tpot_s)

    def status(self) -> mesh_pb2.PredictionStatus:
        """Return the medians of errors and of biases over the latest requests."""
        ttft, tpot = self._ttft_errors or (0.0,), self._tpot_errors or (0.0,)
        return mesh_pb2.PredictionStatus(
            num_requests=self._num_compared,
            ttft_error=median(map(abs, ttft)),
            tpot_error=median(map(abs, tpot)),
            ttft_bias=median(ttft),
            tpot_bias=median(tpot),
        )


def cached_of(placement: Placement, routing_request: RoutingRequest) -> dict[WorkerKey, int]:
    """Return the part of `cached_tokens` that is about the candidates: all of it may name thousands of workers."""
    cached = routing_request.cached_tokens
    if not cached:
        return {}
    views = [placement.decode, placement.prefill]
    for candidate in placement.candidates:
        views += candidate.decode, candidate.prefill
    keys = {view.key for view in views if view is not None}
    return {key: cached[key] for key in keys if key in cached}


# The last workers of sessions: they decide between candidates that cost the same, so a wrong or missing entry costs little. Each
# router has a memory of its own; where other routers have sent a session is known from KV events.

MAX_SESSIONS = 100_000
KEEP_S = 600.0
"""A session is remembered for so long after its last request, or as long as its KV is to be kept."""


@dataclass(frozen=True, slots=True)
class _Entry:
    workers: tuple[WorkerKey, ...]
    expires_at: float


@dataclass(eq=False, slots=True)
class _Session:
    """Hold one session's entries by model. `expires_at`: of the entry that lasts longest. `is_known`: it is in the memory."""

    tenant: str
    session_id: str
    models: dict[str, _Entry] = field(default_factory=dict)
    expires_at: float = 0.0
    is_known: bool = True


class _Sizes:
    """Find the tenant with most sessions. Sizes change by one session at a time, so every change costs the same."""

    def __init__(self) -> None:
        self._of_size: dict[int, dict[str, None]] = {}  # tenants by their number of sessions
        self._largest = 0

    @property
    def largest(self) -> str:
        """Return the tenant with most sessions: of equals, the one that has come to that number first."""
        return next(iter(self._of_size[self._largest]))

    def change(self, tenant: str, before: int, after: int) -> None:
        """Record that a tenant has `after` sessions, one more or one fewer than before."""
        if before:
            del self._of_size[before][tenant]
            if not self._of_size[before]:
                del self._of_size[before]
        if after:
            self._of_size.setdefault(after, {})[tenant] = None
        if after > self._largest or self._largest not in self._of_size:
            self._largest = after


MAX_EXPIRED = 2
"""Entries of the order of expiry that a new session looks at. It adds one, so those that have expired become fewer."""


class SessionMemory:
    """Remember the last workers of at most `max_sessions` sessions, for each model that a session uses. When it is full, the
    tenant with most sessions loses the one that it has used least recently. A new session costs the same with many tenants."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_sessions = max_sessions
        self._clock = clock
        self._num_sessions = 0
        self._tenants: dict[str, OrderedDict[str, _Session]] = {}  # by tenant and session, the least recently used first
        self._sizes = _Sizes()
        self._expiries: list[tuple[float, int, _Session]] = []  # a heap; a session may last longer than its place in it says
        self._num_added = 0

    def __len__(self) -> int:
        """Return the number of sessions, those included that have expired since."""
        return self._num_sessions

    def note(self, prepared: PreparedRequest, workers: tuple[WorkerKey, ...]) -> None:
        """Record the workers of a request: the decode worker, then the prefill worker if there is one. A session that was
        released since the request came is not remembered for it."""
        if not prepared.session_id or prepared.is_released:
            return
        sessions = self._tenants.setdefault(prepared.tenant, OrderedDict())
        session = sessions.get(prepared.session_id)
        expires_at = self._clock() + max(KEEP_S, prepared.kv_retention_s)
        if session is None:
            session = sessions[prepared.session_id] = _Session(prepared.tenant, prepared.session_id, expires_at=expires_at)
            self._added(session, len(sessions))
        session.models[prepared.model.name] = _Entry(workers, expires_at)
        session.expires_at = max(session.expires_at, expires_at)
        sessions.move_to_end(prepared.session_id)
        self._make_room()

    def workers_of(self, prepared: PreparedRequest, is_gone: Callable[[WorkerKey], bool]) -> tuple[WorkerKey, ...]:
        """Return the last workers of the request's session, the decode worker first; empty if they are not known. A decode worker
        that is gone is forgotten."""
        session = self._session(prepared.tenant, prepared.session_id)
        entry = session.models.get(prepared.model.name) if session is not None else None
        if entry is None:
            return ()
        if entry.expires_at >= self._clock() and not is_gone(entry.workers[0]):
            return entry.workers
        self.forget(prepared.tenant, prepared.session_id, prepared.model.name)
        return ()

    def forget(self, tenant: str, session_id: str, model: str = "") -> None:
        """Forget a session that has ended, or what is known of it for one model; an unknown one is ignored."""
        session = self._session(tenant, session_id)
        if session is None:
            return
        if model:
            session.models.pop(model, None)
        if not model or not session.models:
            self._drop(session)

    def _session(self, tenant: str, session_id: str) -> _Session | None:
        sessions = self._tenants.get(tenant)
        return sessions.get(session_id) if sessions is not None else None

    def _added(self, session: _Session, num_of_tenant: int) -> None:
        self._num_sessions += 1
        self._num_added += 1
        self._sizes.change(session.tenant, num_of_tenant - 1, num_of_tenant)
        heapq.heappush(self._expiries, (session.expires_at, self._num_added, session))
        self._drop_expired()

    def _drop(self, session: _Session) -> None:
        sessions = self._tenants[session.tenant]
        del sessions[session.session_id]
        session.is_known = False
        self._num_sessions -= 1
        self._sizes.change(session.tenant, len(sessions) + 1, len(sessions))
        if not sessions:
            del self._tenants[session.tenant]

    def _drop_expired(self) -> None:
        """Drop sessions that have expired, and take those out of the order that were dropped before."""
        now = self._clock()
        for _ in range(MAX_EXPIRED):
            if not self._expiries or (self._expiries[0][0] >= now and self._expiries[0][2].is_known):
                break
            _, number, session = heapq.heappop(self._expiries)
            if session.is_known and session.expires_at >= now:
                heapq.heappush(self._expiries, (session.expires_at, number, session))
            elif session.is_known:
                self._drop(session)
        if len(self._expiries) > 2 * self._num_sessions + 64:
            self._expiries = [entry for entry in self._expiries if entry[2].is_known]
            heapq.heapify(self._expiries)

    def _make_room(self) -> None:
        while self._num_sessions > self._max_sessions:
            self._drop(next(iter(self._tenants[self._sizes.largest].values())))
