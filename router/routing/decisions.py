"""The latest routing decisions of this router, with predicted and observed times. Bounded; only prompt lengths are kept."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from pdmesh.v1 import mesh_pb2
from router.routing.filters import Placement, RoutingRequest
from router.routing.worker_snapshot import Mode, WorkerKey
from router.telemetry.timings import RequestTimings

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
