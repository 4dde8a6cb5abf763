"""What this router remembers of its placements: the latest decisions, with predicted and observed times, and the last workers of
each session. Bounded; of prompts only the lengths are kept."""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        self._ttft_errors: deque[float] = deque(maxlen=MAX_COMPARED)
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
        self._ttft_errors.append(abs(chosen.prediction.ttft_s - ttft_s) / ttft_s)
        if tpot_s:
            self._tpot_errors.append(abs(chosen.prediction.tpot_s - tpot_s) / tpot_s)

    def status(self) -> mesh_pb2.PredictionStatus:
        """Return the median errors over the latest requests."""
        return mesh_pb2.PredictionStatus(
            num_requests=self._num_compared,
            ttft_error=median(self._ttft_errors) if self._ttft_errors else 0.0,
            tpot_error=median(self._tpot_errors) if self._tpot_errors else 0.0,
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


class SessionMemory:
    """Remember the last workers of at most `max_sessions` sessions, for each model that a session uses. When it is full, the
    tenant with most sessions loses the one that it has used least recently."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_sessions = max_sessions
        self._clock = clock
        self._num_sessions = 0
        self._tenants: dict[str, OrderedDict[str, dict[str, _Entry]]] = {}  # by tenant, session and model

    def __len__(self) -> int:
        """Return the number of sessions, those included that have expired since."""
        return self._num_sessions

    def note(self, prepared: PreparedRequest, workers: tuple[WorkerKey, ...]) -> None:
        """Record the workers of a request: the decode worker, then the prefill worker if there is one."""
        if not prepared.session_id:
            return
        sessions, name = self._tenants.setdefault(prepared.tenant, OrderedDict()), prepared.session_id
        self._num_sessions += name not in sessions
        entry = _Entry(workers, self._clock() + max(KEEP_S, prepared.kv_retention_s))
        sessions.setdefault(name, {})[prepared.model.name] = entry
        sessions.move_to_end(name)
        while self._num_sessions > self._max_sessions:
            self._evict()

    def workers_of(self, prepared: PreparedRequest, is_gone: Callable[[WorkerKey], bool]) -> tuple[WorkerKey, ...]:
        """Return the last workers of the request's session, the decode worker first; empty if they are not known. A decode worker
        that is gone is forgotten."""
        sessions = self._tenants.get(prepared.tenant)
        models = sessions.get(prepared.session_id) if sessions is not None else None
        entry = models.get(prepared.model.name) if models is not None else None
        if models is None or entry is None:
            return ()
        if entry.expires_at >= self._clock() and not is_gone(entry.workers[0]):
            return entry.workers
        del models[prepared.model.name]
        if not models:
            self.forget(prepared.tenant, prepared.session_id)
        return ()

    def forget(self, tenant: str, session_id: str) -> None:
        """Forget a session that has ended; an unknown one is ignored."""
        sessions = self._tenants.get(tenant)
        if sessions is None or sessions.pop(session_id, None) is None:
            return
        self._num_sessions -= 1
        if not sessions:
            del self._tenants[tenant]

    def _evict(self) -> None:
        tenant = max(self._tenants, key=lambda name: len(self._tenants[name]))
        self.forget(tenant, next(iter(self._tenants[tenant])))
