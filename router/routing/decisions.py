"""The latest decisions of this router's policy: what was predicted and what came. Bounded; no prompt is kept, only lengths."""

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
    """One choice. `made_ns`: monotonic; `decision_ns` it took; `cached_tokens` of the prompt by worker, of the candidates only.

    What was observed is read from the request's own `timings` when somebody asks."""

    request_id: str
    policy: str
    made_ns: int
    decision_ns: int
    num_tokens: int
    num_workers: int
    placement: Placement
    cached_tokens: Mapping[WorkerKey, int]
    timings: RequestTimings | None = None

    @property
    def observed_ttft_s(self) -> float | None:
        """From the decision to the first token; None before that, and for a decision that was made later."""
        first_ns = self.timings.first_received_ns if self.timings is not None else None
        return None if first_ns is None or first_ns < self.made_ns else (first_ns - self.made_ns) / 1e9

    @property
    def observed_tpot_s(self) -> float | None:
        """Of the request, once it has ended with more than one token."""
        tpot_ns = self.timings.parts.tpot_ns if self.timings is not None else 0
        return tpot_ns / 1e9 if tpot_ns else None


class Decisions:
    """A ring of them, and the errors of the predictions of requests that have ended."""

    def __init__(self, max_decisions: int = MAX_DECISIONS) -> None:
        self._ring: deque[Decision] = deque(maxlen=max_decisions)
        self._ttft_errors: deque[float] = deque(maxlen=MAX_COMPARED)
        self._tpot_errors: deque[float] = deque(maxlen=MAX_COMPARED)
        self._num_compared = 0
        self.counts: Counter[tuple[str, Mode]] = Counter()  # by policy and mode, of all

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def capacity(self) -> int:
        """How many are kept."""
        return self._ring.maxlen or 0

    def record(self, decision: Decision) -> None:
        """Keep it, instead of the oldest."""
        self._ring.append(decision)
        self.counts[decision.policy, decision.placement.mode] += 1

    def latest(self, count: int) -> list[Decision]:
        """The newest first."""
        return [self._ring[-number] for number in range(1, min(count, len(self._ring)) + 1)]

    def of_request(self, request_id: str) -> list[Decision]:
        """The newest first; ids are clients', so several requests may have the same."""
        return [decision for decision in reversed(self._ring) if decision.request_id == request_id]

    def compare(self, decision: Decision) -> None:
        """The request of `decision` has ended: note how far it was from what had been predicted."""
        chosen, ttft_s, tpot_s = decision.placement.chosen, decision.observed_ttft_s, decision.observed_tpot_s
        if chosen is None or chosen.prediction is None or not ttft_s:
            return
        self._num_compared += 1
        self._ttft_errors.append(abs(chosen.prediction.ttft_s - ttft_s) / ttft_s)
        if tpot_s:
            self._tpot_errors.append(abs(chosen.prediction.tpot_s - tpot_s) / tpot_s)

    def status(self) -> mesh_pb2.PredictionStatus:
        """Medians over the latest requests."""
        return mesh_pb2.PredictionStatus(
            num_requests=self._num_compared,
            ttft_error=median(self._ttft_errors) if self._ttft_errors else 0.0,
            tpot_error=median(self._tpot_errors) if self._tpot_errors else 0.0,
        )


def cached_of(placement: Placement, routing_request: RoutingRequest) -> dict[WorkerKey, int]:
    """What of `demand.cached_tokens` is about the candidates: it may name thousands of workers."""
    cached = routing_request.cached_tokens
    if not cached:
        return {}
    views = [placement.decode, placement.prefill]
    for candidate in placement.candidates:
        views += candidate.decode, candidate.prefill
    keys = {view.key for view in views if view is not None}
    return {key: cached[key] for key in keys if key in cached}
