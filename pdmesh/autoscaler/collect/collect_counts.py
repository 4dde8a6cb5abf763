"""What routers have counted between two looks at them, over all routers. Pure.

A round is complete when every router that is known has answered since the one before; only then it counts. While one is silent
the figures are those of the last complete round and grow old: silence is never taken for idleness.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

from pdmesh.v1 import mesh_pb2

SLACK_S = 1.0
"""By which a router's clock and ours may differ over a round: one that started within the round is counted from its beginning."""

Key: TypeAlias = int | str


@dataclass(frozen=True)
class Counts:
    """Sums as in TrafficStatus, since a beginning or between two looks; histograms by class."""

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
    """Since the router's process began. Raises ValueError naming a figure that is none."""
    values: dict[str, Any] = {name: _number(told, name) for name in _NUMBERS}
    values |= {name: _histogram(getattr(told, name)) for name in _HISTOGRAMS}
    return Counts(up_s=told.up_ms / 1000, **values)


def total(parts: Iterable[Counts]) -> Counts:
    """Of all of them."""
    return sum(parts, Counts())


class Round(NamedTuple):
    """A complete one: when it ended, how long it was, and what each router counted in it."""

    at_s: float
    seconds: float
    counts: dict[Key, Counts]


@dataclass(eq=False)
class _Router:
    latest: Counts
    heard_s: float
    counted: Counts | None  # up to where a complete round has counted it; None: not yet


class Rounds:
    """Of all routers' counters; keeps complete rounds of the last `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._routers: dict[Key, _Router] = {}
        self._answered: set[Key] = set()
        self._ended_s: float | None = None  # of the last complete round
        self.rounds: deque[Round] = deque()

    def heard(self, key: Key, counts: Counts, now_s: float) -> None:
        """A router process has answered."""
        router = self._routers.get(key)
        if router is None:
            self._routers[key] = _Router(counts, now_s, self._beginning(counts, now_s))
        else:
            router.latest, router.heard_s = counts, now_s
        self._answered.add(key)

    def forget(self, keys: Collection[Key]) -> None:
        """Routers that are no more. What they counted in complete rounds stays."""
        for key in keys:
            self._routers.pop(key, None)
            self._answered.discard(key)

    @property
    def oldest_s(self) -> float | None:
        """When the router was heard that has been silent for longest; None without any."""
        return min((router.heard_s for router in self._routers.values()), default=None)

    def close(self, now_s: float) -> bool:
        """To be called once all have been asked, and everybody is known who is to answer: ends the round if all have."""
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
        """Of a new router: from zero if it began within this round, else from where it is first seen."""
        if self._ended_s is not None and counts.up_s <= now_s - self._ended_s + SLACK_S:
            return Counts()
        return None


def _number(told: mesh_pb2.TrafficStatus, name: str) -> float:
    value = float(getattr(told, name))
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"traffic.{name}: a router told {value}, which counts nothing")
    return value


def _histogram(told: mesh_pb2.DurationHistogram) -> Counter[int]:
    return Counter({told.first + number: count for number, count in enumerate(told.counts) if count})
