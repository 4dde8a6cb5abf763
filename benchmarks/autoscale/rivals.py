"""What pdmesh's autoscaler is compared with: a fixed pool, Kubernetes' horizontal pod autoscaler, Dynamo's planner. Pure."""

import math
from collections import deque
from dataclasses import dataclass, replace

from pdmesh.planning.capacity_load import Goals, Lengths, Worker
from pdmesh.planning.prompt_times import largest_batch, step_s, times_alone


@dataclass(frozen=True)
class Fixed:
    """So many replicas, whatever comes."""

    replicas: int

    def decide(self, now_s: float) -> int:
        """Replicas wanted."""
        return self.replicas


@dataclass(frozen=True)
class HpaSettings:
    """The defaults of autoscaling/v2 ("Horizontal Pod Autoscaling", kubernetes.io; API reference of HPAScalingRules): tolerance
    10 %; up by 100 % or 4 pods within 15 s, whichever is more, without stabilization; down by 100 % within 15 s, no further than
    the highest recommendation of 300 s. A decision every 15 s (--horizontal-pod-autoscaler-sync-period) is the caller's."""

    target: float
    min_replicas: int = 1
    max_replicas: int = 64
    tolerance: float = 0.1
    down_stabilization_s: float = 300.0
    up_percent: float = 100.0
    up_pods: int = 4
    period_s: float = 15.0

    def __post_init__(self) -> None:
        if not self.target > 0:
            raise ValueError(f"target: {self.target} is not more than 0")


class Hpa:
    """One HorizontalPodAutoscaler. Ask it by one of the two kinds of metric; do not mix them."""

    def __init__(self, settings: HpaSettings) -> None:
        self._settings = settings
        self._recommended: deque[tuple[float, int]] = deque()
        self._grown: deque[tuple[float, int]] = deque()

    def by_utilization(self, now_s: float, utilization: float, num_ready: int, num_starting: int) -> int:
        """Resource metric, as of CPU: `utilization` is the mean of the pods that are ready, in units of what they request.

        ceil(current · value / target) over ready pods. Where that is up, pods that are not ready count as if they used nothing,
        and where that turns the direction or falls within the tolerance, nothing changes ("Algorithm details" of that page)."""
        settings, current = self._settings, num_ready + num_starting
        ratio = utilization / settings.target
        if num_ready == 0 or abs(ratio - 1) <= settings.tolerance:
            return self._behave(now_s, current, current)
        if ratio < 1 or num_starting == 0:
            return self._behave(now_s, current, math.ceil(ratio * num_ready - 1e-9))
        diluted = ratio * num_ready / current
        wanted = current if diluted <= 1 + settings.tolerance else math.ceil(diluted * current - 1e-9)
        return self._behave(now_s, current, max(current, wanted))

    def by_queue(self, now_s: float, queued: float, current: int) -> int:
        """External metric with an average value, as of requests that wait: ceil(all of it / target for each replica), unless that
        is within the tolerance of what each replica has now."""
        settings = self._settings
        ratio = queued / (settings.target * current) if current else math.inf
        if abs(ratio - 1) <= settings.tolerance:
            return self._behave(now_s, current, current)
        return self._behave(now_s, current, math.ceil(queued / settings.target - 1e-9))

    def _behave(self, now_s: float, current: int, wanted: int) -> int:
        """Bounds, stabilization, policies."""
        settings = self._settings
        wanted = min(settings.max_replicas, max(settings.min_replicas, wanted))
        if not self._recommended:  # what there is when it begins counts as recommended (recordInitialRecommendation)
            self._recommended.append((now_s, current))
        self._recommended.append((now_s, wanted))
        while self._recommended[0][0] <= now_s - settings.down_stabilization_s:
            self._recommended.popleft()
        if wanted < current:
            wanted = min(current, max(num for _, num in self._recommended))
        if wanted <= current:
            return wanted
        limited = min(wanted, self._most(now_s, current))
        self._grown.append((now_s, limited - current))
        return max(limited, current)

    def _most(self, now_s: float, current: int) -> int:
        """Of the size at the beginning of the period, the larger of the two policies."""
        settings = self._settings
        while self._grown and self._grown[0][0] <= now_s - settings.period_s:
            self._grown.popleft()
        before = current - sum(num for _, num in self._grown)
        return max(before + settings.up_pods, math.ceil(before * (1 + settings.up_percent / 100)))


# NVIDIA Dynamo's planner as its documentation states it ("Planner Design", throughput-based scaling). Pure.
#
#     every adjustment interval (180 s):
#         correction of prefill = observed TTFT / expected TTFT        correction of decode = observed ITL / expected ITL
#         prefill replicas = ceil(requests · input length / interval · min(1, correction) / tokens/s of an engine's prefill)
#         decode replicas  = ceil(requests · output length / interval / best tokens/s whose ITL is target / correction)
#
# The number and the lengths of requests are predicted for the next interval; "constant" predicts those of the last one.
# Throughput is interpolated from a profile there; here it is the step model's, which makes the profile exact. Its load-based
# mode (one replica more or less each interval, marked experimental) and its other predictors (ARIMA, Kalman, Prophet) are not
# covered.


@dataclass(frozen=True)
class Interval:
    """What was seen in the last one: requests, mean lengths, mean TTFT and ITL (None: no request ended)."""

    num_requests: float
    lengths: Lengths
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True)
class DynamoSettings:
    """Objectives in `goals`; `has_correction` False is its option --no-correction."""

    prefill: Worker
    decode: Worker
    goals: Goals
    interval_s: float = 180.0
    min_replicas: int = 1
    max_replicas: int = 64
    has_correction: bool = True


class DynamoPlanner:
    """Prefill and decode apart."""

    def __init__(self, settings: DynamoSettings) -> None:
        self._settings = settings
        self._prefill_correction = self._decode_correction = 1.0

    def decide(self, seen: Interval, num_decode: int) -> tuple[int, int]:
        """Prefill and decode replicas for the next interval; `num_decode` served in the last one."""
        if self._settings.has_correction:
            self._correct(seen, num_decode)
        per_s = seen.num_requests / self._settings.interval_s
        prefill = per_s * seen.lengths.input_tokens * min(1.0, self._prefill_correction) / self.prefill_tokens_per_s(seen.lengths)
        decode = per_s * seen.lengths.output_tokens / self.decode_tokens_per_s(seen.lengths, self._decode_correction)
        return self._bounded(prefill), self._bounded(decode)

    def prefill_tokens_per_s(self, lengths: Lengths) -> float:
        """Of an engine that computes one prompt of the mean length after the other."""
        return lengths.input_tokens / self._expected_ttft_s(lengths)

    def decode_tokens_per_s(self, lengths: Lengths, correction: float) -> float:
        """The most of an engine with its steps within the objective / `correction`; where none is, its least step."""
        context = _context(lengths)
        goal_s = math.inf if self._settings.goals.tpot_s is None else self._settings.goals.tpot_s / correction
        same = replace(lengths, output_squared=lengths.output_tokens**2)
        worker = self._settings.decode
        if step_s(worker.model, 1, context) > goal_s:
            return 1 / step_s(worker.model, 1, context)
        batch = largest_batch(worker, same, Goals(tpot_s=None if goal_s == math.inf else goal_s))
        return batch / step_s(worker.model, batch, context)

    def _correct(self, seen: Interval, num_decode: int) -> None:
        """Expected ITL: at the concurrency that the load of the interval means for each engine."""
        if seen.ttft_s is not None:
            self._prefill_correction = seen.ttft_s / self._expected_ttft_s(seen.lengths)
        if seen.itl_s is None or num_decode < 1:
            return
        running = seen.num_requests / self._settings.interval_s * seen.itl_s * seen.lengths.output_tokens / num_decode
        expected_s = step_s(self._settings.decode.model, max(1.0, running), _context(seen.lengths))
        self._decode_correction = max(1e-3, seen.itl_s / expected_s)

    def _expected_ttft_s(self, lengths: Lengths) -> float:
        mean = replace(lengths, input_squared=lengths.input_tokens**2)
        return times_alone(self._settings.prefill, mean).mean_s

    def _bounded(self, replicas: float) -> int:
        return min(self._settings.max_replicas, max(self._settings.min_replicas, math.ceil(replicas - 1e-9)))


def _context(lengths: Lengths) -> float:
    """Input and half of the output, as the document has it."""
    return lengths.input_tokens + lengths.output_tokens / 2
