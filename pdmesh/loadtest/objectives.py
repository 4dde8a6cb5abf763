"""What a request must keep to count as good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmesh.planning import objectives as planned_objectives

DEFAULT_QUANTILE = 0.9


@dataclass(frozen=True)
class Objectives:
    """Upper bounds in milliseconds; None: no bound. `quantile`: the share of requests, in (0, 1], that must keep all of them."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    quantile: float = DEFAULT_QUANTILE

    @property
    def bounds(self) -> dict[str, float]:
        """Those that are set, by name: ttft, tpot, e2e."""
        named = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: bound for name, bound in named.items() if bound is not None}

    def longest_ms(self, num_tokens: int) -> float:
        """The most time that an answer of so many tokens may take; infinite where the bounds leave that open."""
        by_tokens = math.inf
        if self.ttft_ms is not None and (num_tokens == 1 or self.tpot_ms is not None):
            by_tokens = self.ttft_ms + (num_tokens - 1) * (self.tpot_ms or 0.0)
        return by_tokens if self.e2e_ms is None else min(by_tokens, self.e2e_ms)

    def __str__(self) -> str:
        bounds = " and ".join(f"{name.upper()} <= {bound:g} ms" for name, bound in self.bounds.items())
        return f"{bounds} for {100 * self.quantile:g} % of requests" if bounds else "none"


@dataclass(frozen=True)
class ObjectiveBook:
    """The objectives of each class of traffic, where they differ from the common ones."""

    common: Objectives
    by_class: Mapping[str, Objectives] = field(default_factory=dict)

    def of(self, traffic_class: str) -> Objectives:
        """The objectives that a request of this class has."""
        return self.by_class.get(traffic_class, self.common)

    @property
    def any(self) -> bool:
        """Whether there is anything to keep."""
        return any(objectives.bounds for objectives in (self.common, *self.by_class.values()))


def from_file(path: str, model: str) -> Objectives:
    """The objectives of `model` (or of the only one) in the file that the router reads. Raises ConfigError; ValueError if the
    file says nothing of the model."""
    known = {objective.model: objective for objective in planned_objectives.load(path)}
    chosen = next(iter(known.values())) if len(known) == 1 and not model else known.get(model)
    if chosen is None:
        raise ValueError(f"objectives: {path} says nothing of model {model!r}; it names {', '.join(known) or 'none'}")
    return Objectives(ttft_ms=chosen.ttft_ms, tpot_ms=chosen.tpot_ms, quantile=chosen.quantile)
