"""The record of a finished request, and the objectives that it is judged by.

Times are seconds since the start of the run, on a monotonic clock.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from pdmesh.planning import objectives as planning_objectives


class Outcome(Enum):
    """Name how a request ended."""

    OK = "ok"
    # As planned.
    CANCELLED = "cancelled"
    # The target said that it had no capacity.
    REFUSED = "refused"
    TIMEOUT = "timeout"
    ERROR = "error"
    # Due while the maximum number was running: the load test never waits for one of them to end.
    NOT_SENT = "not_sent"
    # The load test itself was interrupted; does not count.
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Record:
    """Record one request. Latencies count from `scheduled_s`, when it was due, so that a stall of the target (or a delay of the
    load test) shows in all the requests that waited. `token_times` has a time for each message that carried tokens.

    It is turn number `turn` of `num_turns` that its session has, behind `depth` others. It was held until `ready_s` (None: not
    held), when the turn before it had ended. Of `prompt_tokens`, as they were planned, the first `reusable_tokens` were those of
    a prompt or an answer that this run had sent or received before."""

    session: int
    turn: int
    traffic_class: str
    tenant: str
    priority: str
    scheduled_s: float
    sent_s: float
    end_s: float
    outcome: Outcome
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    token_times: array[float] = field(default_factory=lambda: array("d"))
    error: str = ""
    # Where the server says that the time went, in milliseconds, in order; empty where it says nothing.
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    workers: str = ""
    num_turns: int = 1
    depth: int = 0
    ready_s: float | None = None
    prompt_tokens: int = 0
    reusable_tokens: int = 0

    @property
    def lateness_s(self) -> float:
        """Return how late the load test itself was, from when the request was due, or was no longer held."""
        return self.sent_s - (self.scheduled_s if self.ready_s is None else self.ready_s)

    @property
    def held_s(self) -> float | None:
        """Return how long it was held after it was due; None if it was not."""
        return None if self.ready_s is None else self.ready_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Return the time from when it was due to its first token."""
        return self.token_times[0] - self.scheduled_s if self.token_times else None

    @property
    def ttft_from_sent_s(self) -> float | None:
        """Return the time from when it was sent to its first token: what a load test that ignores its own delays would report."""
        return self.token_times[0] - self.sent_s if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per token after the first; None below two tokens."""
        if self.output_tokens < 2 or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Return the time from when it was due to its last token, if it was answered in full."""
        return self.token_times[-1] - self.scheduled_s if self.outcome is Outcome.OK and self.token_times else None

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between one message with tokens and the next (ITL)."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


# What a request must keep to count as good.


DEFAULT_QUANTILE = 0.9


@dataclass(frozen=True)
class Objectives:
    """Hold upper bounds in milliseconds; None: no bound. `quantile`: the share of requests, in (0, 1], that must keep all of
    them."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    quantile: float = DEFAULT_QUANTILE

    @property
    def bounds(self) -> dict[str, float]:
        """Return the bounds that are set, by name: ttft, tpot, e2e."""
        named = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: bound for name, bound in named.items() if bound is not None}

    def longest_ms(self, num_tokens: int) -> float:
        """Return the most time that an answer of so many tokens may take; infinite where the bounds leave that open."""
        by_tokens = math.inf
        if self.ttft_ms is not None and (num_tokens == 1 or self.tpot_ms is not None):
            by_tokens = self.ttft_ms + (num_tokens - 1) * (self.tpot_ms or 0.0)
        return by_tokens if self.e2e_ms is None else min(by_tokens, self.e2e_ms)

    def __str__(self) -> str:
        bounds = " and ".join(f"{name.upper()} <= {bound:g} ms" for name, bound in self.bounds.items())
        return f"{bounds} for {100 * self.quantile:g} % of requests" if bounds else "none"


@dataclass(frozen=True)
class ObjectiveBook:
    """Hold the objectives of each class of traffic, where they differ from the common ones."""

    common: Objectives
    by_class: Mapping[str, Objectives] = field(default_factory=dict)

    def of(self, traffic_class: str) -> Objectives:
        """Return the objectives of a request of this class."""
        return self.by_class.get(traffic_class, self.common)

    @property
    def any(self) -> bool:
        """Return whether there is any objective."""
        return any(objectives.bounds for objectives in (self.common, *self.by_class.values()))


def from_file(path: str, model: str) -> Objectives:
    """Return the objectives of `model` (or of the only one) in the file that the router reads. Raises ConfigError; ValueError if
    the file does not name the model."""
    known = {objective.model: objective for objective in planning_objectives.load(path)}
    chosen = next(iter(known.values())) if len(known) == 1 and not model else known.get(model)
    if chosen is None:
        raise ValueError(f"objectives: {path} says nothing of model {model!r}; it names {', '.join(known) or 'none'}")
    return Objectives(ttft_ms=chosen.ttft_ms, tpot_ms=chosen.tpot_ms, quantile=chosen.quantile)
