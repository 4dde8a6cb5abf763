"""Sums the routers' counters over complete rounds and derives the traffic of the latest window. Pure."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

from pdmesh.autoscaler.views import Measured, Traffic
from pdmesh.planning.capacity_load import Lengths, quantile_s
from pdmesh.v1 import mesh_pb2

# Counters of all routers between two looks.
#
# A round is complete, and counts, when every known router has answered since the previous one. While a router is silent the
# figures are those of the last complete round and grow old: silence is never taken for idleness.


SLACK_S = 1.0
"""Seconds by which a router's clock and ours may differ over a round: a router that started within the round is counted from its
start."""

Key: TypeAlias = int | str


@dataclass(frozen=True)
class Counts:
    """Hold sums as in TrafficStatus, since the process started or between two looks; histograms by class."""

    up_s: float = 0.0
    num_arrived: float = 0.0
    input_tokens: float = 0.0
    input_squared: float = 0.0
    num_gaps: float = 0.0
    gaps_s: float = 0.0
    gaps_squared: float = 0.0
    num_answered: float = 0.0
    output_tokens: float = 0.0
    output_squared: float = 0.0
    answered_input_tokens: float = 0.0
    cached_tokens: float = 0.0
    num_refused: float = 0.0
    ttft_observed: Counter[int] = field(default_factory=Counter)
    ttft_predicted: Counter[int] = field(default_factory=Counter)
    tpot_observed: Counter[int] = field(default_factory=Counter)
    tpot_predicted: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


_NUMBERS = tuple(each.name for each in fields(Counts) if each.type is float and each.name != "up_s")
_HISTOGRAMS = ("ttft_observed", "ttft_predicted", "tpot_observed", "tpot_predicted")


def counts_of(told: mesh_pb2.TrafficStatus) -> Counts:
    """Return the counts since the router process started. Raises ValueError naming a figure that is invalid."""
    values: dict[str, Any] = {name: _number(told, name) for name in _NUMBERS}
    values |= {name: _histogram(getattr(told, name)) for name in _HISTOGRAMS}
    return Counts(up_s=told.up_ms / 1000, **values)


def total(parts: Iterable[Counts]) -> Counts:
    """Return the sum of all parts."""
    return sum(parts, Counts())


class Round(NamedTuple):
    """Hold a complete round: when it ended, how long it was, and what each router counted in it."""

    at_s: float
    seconds: float
    counts: dict[Key, Counts]


@dataclass(eq=False)
class _Router:
    latest: Counts
    heard_s: float
    counted: Counts | None  # the counts that complete rounds already include; None: none yet


class Rounds:
    """Hold the complete rounds of the last `keep_s` seconds over all routers' counters."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._routers: dict[Key, _Router] = {}
        self._answered: set[Key] = set()
        self._ended_s: float | None = None  # end of the last complete round
        self.rounds: deque[Round] = deque()

    def heard(self, key: Key, counts: Counts, now_s: float) -> None:
        """Record the answer of a router process."""
        router = self._routers.get(key)
        if router is None:
            self._routers[key] = _Router(counts, now_s, self._beginning(counts, now_s))
        else:
            router.latest, router.heard_s = counts, now_s
        self._answered.add(key)

    def forget(self, keys: Collection[Key]) -> None:
        """Forget routers that are gone. What they counted in complete rounds stays."""
        for key in keys:
            self._routers.pop(key, None)
            self._answered.discard(key)

    @property
    def oldest_s(self) -> float | None:
        """Return when the router that has been silent longest last answered; None without routers."""
        return min((router.heard_s for router in self._routers.values()), default=None)

    def close(self, now_s: float) -> bool:
        """End the round if all known routers have answered. Call it once all have been asked; returns whether the round ended."""
        if not self._routers or self._answered != self._routers.keys():
            return False
        counts = {key: router.latest - router.counted for key, router in self._routers.items() if router.counted is not None}
        if self._ended_s is not None and counts:
            self.rounds.append(Round(now_s, max(1e-3, now_s - self._ended_s), counts))
        for router in self._routers.values():
            router.counted = router.latest
        self._ended_s = now_s
        self._answered.clear()
        while self.rounds and self.rounds[0].at_s <= now_s - self._keep_s:
            self.rounds.popleft()
        return True

    def _beginning(self, counts: Counts, now_s: float) -> Counts | None:
        """Return a new router's baseline: zero if it started within this round, else its first counts."""
        if self._ended_s is not None and counts.up_s <= now_s - self._ended_s + SLACK_S:
            return Counts()
        return None


def _number(told: mesh_pb2.TrafficStatus, name: str) -> float:
    value = float(getattr(told, name))
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"traffic.{name}: a router reported {value}, which is not a count")
    return value


def _histogram(told: mesh_pb2.DurationHistogram) -> Counter[int]:
    return Counter({told.first + number: count for number, count in enumerate(told.counts) if count})


USUAL_GAPS = 10
"""Pseudo-observations of independent arrivals that each estimate starts with: the variance of a few gaps says next to nothing."""

MIN_MEASURED = 8
"""Requests below which no latency quantile is reported."""

MOST_CACHED = 0.99


def traffic_of(
    rounds: Iterable[Round], waiting: Collection[mesh_pb2.TrafficStatus], window_s: float, quantile: float, age_s: float
) -> Traffic | None:
    """Return the traffic of at least the last `window_s` seconds, as far as rounds reach back; None before the first round.
    `waiting` holds what routers last reported about requests that wait now."""
    window = _latest(list(rounds), window_s)
    if not window:
        return None
    by_router = _by_router(window)
    counts = total(by_router.values())
    seconds = sum(each.seconds for each in window)
    return Traffic(
        rate_per_s=counts.num_arrived / seconds,
        lengths=lengths_of(counts),
        window_s=seconds,
        burstiness=_burstiness(by_router.values()),
        num_queued=sum(told.num_queued for told in waiting),
        queue_wait_s=max((told.queue_wait_ms for told in waiting), default=0) / 1000,
        ttft=_measured(counts.ttft_observed, counts.ttft_predicted, quantile),
        tpot=_measured(counts.tpot_observed, counts.tpot_predicted, quantile),
        age_s=age_s,
    )


def _latest(rounds: Sequence[Round], window_s: float) -> list[Round]:
    """Return the last rounds that together span at least the window, or all."""
    chosen: list[Round] = []
    for each in reversed(rounds):
        if sum(one.seconds for one in chosen) >= window_s:
            break
        chosen.append(each)
    return chosen


def _by_router(window: Iterable[Round]) -> dict[Key, Counts]:
    by_router: dict[Key, Counts] = {}
    for each in window:
        for key, counts in each.counts.items():
            by_router[key] = by_router.get(key, Counts()) + counts
    return by_router


def lengths_of(counts: Counts) -> Lengths | None:
    """Return the lengths of the requests; None before any has arrived or been answered."""
    if not counts.num_arrived or not counts.num_answered:
        return None
    inputs, outputs = (max(1.0, each) for each in (_mean(counts, "input", "arrived"), _mean(counts, "output", "answered")))
    cached = counts.cached_tokens / max(1.0, counts.answered_input_tokens)
    return Lengths(
        input_tokens=inputs,
        input_squared=max(inputs**2, counts.input_squared / counts.num_arrived),
        output_tokens=outputs,
        cached_share=min(MOST_CACHED, max(0.0, cached)),
        output_squared=max(outputs**2, counts.output_squared / counts.num_answered),
    )


def _mean(counts: Counts, tokens: str, requests: str) -> float:
    return float(getattr(counts, f"{tokens}_tokens") / getattr(counts, f"num_{requests}"))


def _burstiness(by_router: Iterable[Counts]) -> float:
    """Return the burstiness of all arrivals together. Variances of counts add up, so the routers' own values are weighted by
    their arrivals (the asymptotic method of Whitt, "Approximating a point process by a renewal process", 1982)."""
    arrivals, weighted = 0.0, 0.0
    for counts in by_router:
        arrivals += counts.num_arrived
        weighted += counts.num_arrived * _variation(counts)
    return weighted / arrivals if arrivals else 1.0


def _variation(counts: Counts) -> float:
    """Return the squared coefficient of variation of the gaps, including the pseudo-observations."""
    if not counts.num_gaps or counts.gaps_s <= 0:
        return 1.0
    mean = counts.gaps_s / counts.num_gaps
    seen = max(0.0, counts.gaps_squared / counts.num_gaps / mean**2 - 1)
    return (counts.num_gaps * seen + USUAL_GAPS) / (counts.num_gaps + USUAL_GAPS)


def _measured(observed: Counter[int], predicted: Counter[int], quantile: float) -> Measured:
    if observed.total() < MIN_MEASURED:
        return Measured()
    return Measured(quantile_s(observed, quantile), quantile_s(predicted, quantile))
