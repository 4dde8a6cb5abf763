"""The highest rate at which enough requests keep their objectives: a search over observations. Pure.

The rate doubles until it is too high, then the interval between the highest rate that held and the lowest that did not is halved
until it is narrow. A rate holds if most of its windows do, further ones (a confirmation) included;
the windows of a rate end as soon as that is decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One window at a rate: the share of requests that kept their objectives, and how many did so per second."""

    rate: float
    attainment: float
    goodput: float


@dataclass(frozen=True)
class Search:
    """What is looked for. `tolerance`: how much higher than the answer the lowest rate that fails may be, as a share."""

    attainment: float = 0.9
    first_rate: float = 1.0
    max_rate: float = 10_000.0
    min_rate: float = 0.01
    tolerance: float = 0.05
    windows: int = 3

    def holds(self, rate: float, trials: Sequence[Trial]) -> bool | None:
        """Whether most windows at `rate` attained enough, of `windows` or of as many as there are; None while that is open."""
        verdicts = [trial.attainment >= self.attainment for trial in trials if trial.rate == rate]
        total = max(self.windows, len(verdicts))
        needed = total // 2 + 1
        if sum(verdicts) >= needed:
            return True
        return False if len(verdicts) - sum(verdicts) > total - needed else None

    def bounds(self, trials: Sequence[Trial]) -> tuple[float | None, float | None]:
        """The highest rate that held below the lowest that did not, and that one; None: there is none yet.

        Of a rate that held above one that failed, chance is the likelier cause: it does not count."""
        verdicts = {rate: self.holds(rate, trials) for rate in sorted({trial.rate for trial in trials})}
        failed = min((rate for rate, held in verdicts.items() if held is False), default=None)
        held = [rate for rate, held in verdicts.items() if held and (failed is None or rate < failed)]
        return max(held, default=None), failed

    def next_rate(self, trials: Sequence[Trial]) -> float | None:
        """The rate of the next window; None when the search is over."""
        for trial in reversed(trials):
            if self.holds(trial.rate, trials) is None:
                return trial.rate
        held, failed = self.bounds(trials)
        if held is None and failed is None:
            return min(self.first_rate, self.max_rate)
        if failed is None:
            assert held is not None
            return None if held >= self.max_rate else min(2 * held, self.max_rate)
        if held is None:
            return None if failed / 2 < self.min_rate else failed / 2
        return None if failed <= held * (1 + self.tolerance) else (held + failed) / 2


@dataclass(frozen=True)
class Capacity:
    """What was found: `rate` requests per second held and `failed_rate` did not. None for `rate`: not even the lowest one held;
    None for `failed_rate`: the highest rate that was allowed held, so the capacity may be higher."""

    attainment: float
    rate: float | None
    failed_rate: float | None
    goodput: float | None

    def as_json(self) -> Mapping[str, float | None]:
        return {
            "attainment": self.attainment,
            "rate": self.rate,
            "failed_rate": self.failed_rate,
            "goodput": self.goodput,
        }


def found(search: Search, trials: Sequence[Trial]) -> Capacity:
    """The answer, once `next_rate` is None (before that: what is known so far)."""
    held, failed = search.bounds(trials)
    at_best = [trial.goodput for trial in trials if trial.rate == held]
    return Capacity(search.attainment, held, failed, sum(at_best) / len(at_best) if at_best else None)
