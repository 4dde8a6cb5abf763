"""Traffic counts for the planner, which decides the number of workers: sums that only grow. Pure.

arrive ──► Visit ─┬► placed ──► ended       it got a worker, and tokens
                  └► refused ─► ended       or neither

The difference of two readings is what happened between them, for any number of readers at any period.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdmesh.planning.capacity_load import class_of
from pdmesh.v1 import mesh_pb2


@dataclass(eq=False)
class Sums:
    """Hold the count of one kind of figure, its sum, and the sum of its squares."""

    count: int = 0
    total: float = 0.0
    squared: float = 0.0

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        self.total += value
        self.squared += value * value


@dataclass(eq=False)
class Durations:
    """Hold observed and predicted durations of the same requests: counts by class (`pdmesh/planning/capacity_load.py`)."""

    observed: Counter[int] = field(default_factory=Counter)
    predicted: Counter[int] = field(default_factory=Counter)

    def add(self, observed_s: float, predicted_s: float) -> None:
        """Add one request."""
        self.observed[class_of(observed_s)] += 1
        self.predicted[class_of(predicted_s)] += 1


@dataclass(eq=False)
class ModelTraffic:
    """Count the traffic of one model.

    `inputs`: prompt tokens of all requests that came, each request once however often it was tried; `gaps`: seconds between them;
    `outputs`: output tokens of requests that got a token and have ended; `answered_inputs` and `cached_tokens`: of the same
    requests. `began` and all other times are seconds of one monotonic clock.
    """

    began: float
    inputs: Sums = field(default_factory=Sums)
    gaps: Sums = field(default_factory=Sums)
    outputs: Sums = field(default_factory=Sums)
    answered_inputs: float = 0.0
    cached_tokens: float = 0.0
    num_refused: int = 0
    ttft: Durations = field(default_factory=Durations)
    tpot: Durations = field(default_factory=Durations)
    _latest: float | None = None
    _promised: "dict[Visit, float]" = field(default_factory=dict)
    _batch: "dict[Visit, float]" = field(default_factory=dict)

    def arrive(self, num_tokens: int, now: float, *, is_batch: bool = False, is_new: bool = True) -> "Visit":
        """Count a request with a prompt of `num_tokens`, which waits from now on. `is_batch`: it has no objective. `is_new`: it
        has not come before; a retry is not counted again."""
        if is_new:
            self._count(num_tokens, now)
        visit = Visit(self, num_tokens)
        (self._batch if is_batch else self._promised)[visit] = now
        return visit

    def _count(self, num_tokens: int, now: float) -> None:
        self.inputs.add(num_tokens)
        if self._latest is not None:
            self.gaps.add(max(0.0, now - self._latest))
        self._latest = now

    @property
    def num_queued(self) -> int:
        """Return the number of requests that wait for a worker."""
        return len(self._promised) + len(self._batch)

    def queue_wait_s(self, now: float) -> float:
        """Return how long the first waiting request with an objective has waited."""
        return max(0.0, now - next(iter(self._promised.values()), now))

    def stop_waiting(self, visit: "Visit") -> None:
        """Stop counting the request as waiting; idempotent."""
        self._promised.pop(visit, None)
        self._batch.pop(visit, None)


class Visit:
    """Follow one request, from its arrival to its end."""

    __slots__ = ("_ended", "_num_tokens", "_traffic")

    def __init__(self, traffic: ModelTraffic, num_tokens: int) -> None:
        self._traffic, self._num_tokens, self._ended = traffic, num_tokens, False

    def placed(self) -> None:
        """Record that a worker is being asked, so that the request no longer waits."""
        self._traffic.stop_waiting(self)

    def refused(self) -> None:
        """Record that there was no room for it."""
        self._traffic.num_refused += 1

    def ended(self, num_output_tokens: int, num_cached_tokens: int) -> None:
        """Record its end, whatever it was; idempotent. `num_cached_tokens` of its prompt were not computed."""
        if self._ended:
            return
        self._ended = True
        self._traffic.stop_waiting(self)
        if num_output_tokens > 0:
            self._traffic.outputs.add(num_output_tokens)
            self._traffic.answered_inputs += self._num_tokens
            self._traffic.cached_tokens += min(num_cached_tokens, self._num_tokens)


class Traffic:
    """Count the traffic of all models that a router serves."""

    def __init__(self, models: Iterable[str], now: float) -> None:
        self.models = {model: ModelTraffic(now) for model in models}

    def of(self, model: str) -> ModelTraffic:
        """Return one model's traffic. Raises KeyError for one that is not served."""
        return self.models[model]


# Traffic as messages, for the status.


def traffic_status(traffic: Traffic, now: float) -> list[mesh_pb2.TrafficStatus]:
    """Return the traffic of each model, also of one without requests."""
    return [_of_model(model, counted, now) for model, counted in traffic.models.items()]


def _of_model(model: str, counted: ModelTraffic, now: float) -> mesh_pb2.TrafficStatus:
    return mesh_pb2.TrafficStatus(
        model=model,
        up_ms=max(0, round((now - counted.began) * 1000)),
        num_arrived=counted.inputs.count,
        input_tokens=counted.inputs.total,
        input_squared=counted.inputs.squared,
        num_gaps=counted.gaps.count,
        gaps_s=counted.gaps.total,
        gaps_squared=counted.gaps.squared,
        num_answered=counted.outputs.count,
        output_tokens=counted.outputs.total,
        output_squared=counted.outputs.squared,
        answered_input_tokens=counted.answered_inputs,
        cached_tokens=counted.cached_tokens,
        num_queued=counted.num_queued,
        queue_wait_ms=round(counted.queue_wait_s(now) * 1000),
        num_refused=counted.num_refused,
        ttft_observed=_histogram(counted.ttft.observed),
        ttft_predicted=_histogram(counted.ttft.predicted),
        tpot_observed=_histogram(counted.tpot.observed),
        tpot_predicted=_histogram(counted.tpot.predicted),
    )


def _histogram(counts: Mapping[int, int]) -> mesh_pb2.DurationHistogram:
    if not counts:
        return mesh_pb2.DurationHistogram()
    first, last = min(counts), max(counts)
    return mesh_pb2.DurationHistogram(first=first, counts=[counts.get(number, 0) for number in range(first, last + 1)])
