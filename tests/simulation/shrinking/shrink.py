"""Makes a scenario that fails smaller, as long as a violation of the same kind stays (Zeller and Hildebrandt, 2002, ddmin).

First requests, then faults, then members are taken away, the larger half first; then outputs and prompts become short. What is
left runs with other latencies and turns than before, so that each is tried with a few seeds of the world.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.simulation.profiles import scenario
from tests.simulation.runs import Case, Ran, run_alone
from tests.simulation.scenario import Scenario
from tests.simulation.shrinking.reduction import Reduction

NUM_WORLDS = 3
MAX_RUNS = 300
TOKENS = (1, 2, 4, 8, 16, 30)
KIND_WORDS = 8


def kind_of(violation: str) -> str:
    """Return what violations of one kind have in common: words, without names, numbers and what stands in parentheses."""
    text = violation.strip().splitlines()[-1] if "Traceback" in violation else violation
    while (shorter := re.sub(r"\([^()]*\)|\[[^][]*\]|\{[^{}]*\}", "", text)) != text:
        text = shorter
    words = re.findall(r"[A-Za-z_]+", re.sub(r"\b[a-z]+-\d+\b", "", text))
    return " ".join(words[:KIND_WORDS])


class Shrinking:
    """One search. `run` runs a case; the search ends after `max_runs`."""

    def __init__(self, ran: Ran, run: Callable[[Case], Ran] = run_alone, max_runs: int = MAX_RUNS) -> None:
        self.smallest = ran
        self.num_runs = 0
        self._run, self._max_runs = run, max_runs
        self._kinds = {kind_of(violation) for violation in ran.violations}
        self._scenario = scenario(ran.case.seed)

    def shrink(self) -> Ran:
        """Take away until nothing more can go; return the smallest case that fails."""
        while self._pass():
            pass
        return self.smallest

    def _pass(self) -> bool:
        return any([
            self._thin(lambda left: left.asks, len(self._scenario.asks), lambda left, kept: replace(left, asks=kept)),
            self._thin(lambda left: left.faults, len(self._scenario.faults), lambda left, kept: replace(left, faults=kept)),
            self._remove_members(),
            self._shorten(lambda left: left.max_tokens, lambda left, most: replace(left, max_tokens=most)),
            self._shorten(lambda left: left.max_prompt, lambda left, most: replace(left, max_prompt=most)),
        ])  # fmt: skip  # a list: all of them, each time

    def _thin(
        self,
        chosen: Callable[[Reduction], tuple[int, ...] | None],
        number: int,
        with_chosen: Callable[[Reduction, tuple[int, ...]], Reduction],
    ) -> bool:
        """Take away items of a list, in halves, then quarters, and so on."""
        now = chosen(self._reduction)
        kept = tuple(range(number)) if now is None else now
        has_shrunk, size = False, max(1, len(kept))
        while size:
            for part in list(_parts(kept, size)):
                fewer = tuple(item for item in kept if item not in part)
                if len(fewer) < len(kept) and self._fails(with_chosen(self._reduction, fewer)):
                    kept, has_shrunk = fewer, True
            size //= 2
        return has_shrunk

    def _remove_members(self) -> bool:
        has_shrunk = False
        for name in _members(self._reduction.of(self._scenario)):
            if name in self._scenario.spared:
                continue  # without a whole member of each kind, requests may fail
            less = replace(self._reduction, without=(*self._reduction.without, name))
            has_shrunk |= _is_a_mesh(less.of(self._scenario)) and self._fails(less)
        return has_shrunk

    def _shorten(self, limit: Callable[[Reduction], int | None], with_limit: Callable[[Reduction, int], Reduction]) -> bool:
        now = limit(self._reduction)
        return any(self._fails(with_limit(self._reduction, most)) for most in TOKENS if now is None or most < now)

    @property
    def _reduction(self) -> Reduction:
        return self.smallest.case.reduction

    def _fails(self, reduction: Reduction) -> bool:
        """Return whether what is left fails in the same way, with some seed of the world; it is the smallest then."""
        worlds = [self._reduction.world, *range(1, NUM_WORLDS + 1)]
        for world in dict.fromkeys(worlds):
            if self.num_runs >= self._max_runs:
                return False
            self.num_runs += 1
            ran = self._run(Case(self.smallest.case.seed, replace(reduction, world=world)))
            if self._kinds & {kind_of(violation) for violation in ran.violations}:
                self.smallest = ran
                return True
        return False


def shrunk(ran: Ran, max_runs: int = MAX_RUNS) -> tuple[Ran, int]:
    """Return the smallest case found that fails as `ran` did, and how many runs that took."""
    search = Shrinking(ran, max_runs=max_runs)
    return search.shrink(), search.num_runs


def _parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _members(left: Scenario) -> tuple[str, ...]:
    return (*left.boths, *left.decodes, *left.prefills, *left.routers)


def _is_a_mesh(left: Scenario) -> bool:
    return bool(left.routers) and bool(left.decodes or left.boths)
