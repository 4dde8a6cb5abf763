"""The cheapest mesh that keeps the objectives, found by simulating few of them. Pure.

More workers never keep objectives for fewer requests: so of one shape, costs are bisected from where capacity arithmetic points,
and a size is known to fail when a larger one did. At each cost the splits between the pools that should bear most are tried. A
simulation ends as soon as more requests have missed than may; of a long trace the busiest part, where most miss, comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.planner.guess import Guesser
from pdmesh.planner.meshes import Point, Shape, Size
from pdmesh.planner.traffic import Traffic
from pdmesh.planner.trial import Outcome, simulate
from pdmesh.simulator.settings import MeshSettings

SCREEN_REQUESTS = 2000
"""Of the busiest part; a load of less than twice as many has none."""


class Spent(Exception):
    """As many requests were simulated as may be."""


@dataclass
class Judge:
    """Says whether meshes keep the objectives of a share `quantile` of the requests; remembers what it has seen.
    `max_requests`: to be simulated before it gives up."""

    traffic: Traffic
    settings: MeshSettings
    quantile: float
    max_requests: int
    num_requests: int = 0
    num_runs: int = 0
    outcomes: dict[Point, Outcome] = field(default_factory=dict)
    _kept: dict[Point, bool] = field(default_factory=dict)

    def keeps(self, point: Point) -> bool:
        """Raises Spent."""
        known = self._kept.get(point)
        if known is None:
            known = self._implied(point)
        if known is None:
            known = self._kept[point] = self._try(point)
        return known

    def outcome(self, point: Point) -> Outcome:
        """All of it, whatever it costs."""
        if point not in self.outcomes:
            found = self._run(point, self.traffic, None)
            assert found is not None
            self.outcomes[point] = found
        return self.outcomes[point]

    @property
    def _max_misses(self) -> int:
        """Of all requests; rounding is not to forbid a share that is allowed."""
        return int(len(self.traffic.arrivals) * (1 - self.quantile) + 1e-6)

    def _try(self, point: Point) -> bool:
        if self.num_requests >= self.max_requests:
            raise Spent
        if point in self.outcomes:
            return self.outcomes[point].attainment >= self.quantile
        if len(self.traffic.arrivals) >= 2 * SCREEN_REQUESTS:
            part = self.traffic.busiest(SCREEN_REQUESTS)
            if self._run(point, part, self._max_misses) is None:
                return False
        found = self._run(point, self.traffic, self._max_misses)
        if found is not None:
            self.outcomes[point] = found
        return found is not None

    def _implied(self, point: Point) -> bool | None:
        """By what is known of a larger or smaller mesh of the same shape."""
        for other, kept in self._kept.items():
            if other.shape == point.shape:
                small, large = (other, point) if kept else (point, other)
                if small.size.at_most(large.size):
                    return kept
        return None

    def _run(self, point: Point, traffic: Traffic, max_misses: int | None) -> Outcome | None:
        self.num_runs += 1
        self.num_requests += len(traffic.arrivals)
        return simulate(point, traffic.arrivals, self.settings, max_misses)


@dataclass
class Search:
    """`max_splits`: sizes that are tried at one cost."""

    judge: Judge
    guesser: Guesser
    max_splits: int
    is_spent: bool = False
    _best: Point | None = None

    def cheapest(self, shapes: Sequence[Shape], max_cost: int) -> Point | None:
        """Of all of them, in this order: a later one has to be cheaper. None: none for at most so many devices, or none before
        all was spent."""
        self._best = None
        try:
            for shape in shapes:
                self._seek(shape, max_cost if self._best is None else self._best.cost - 1)
        except Spent:
            self.is_spent = True
        return self._best

    def sizes(self, shape: Shape, cost: int) -> list[Size]:
        """To be tried at a cost, the most promising first."""
        return self.guesser.in_order(shape, shape.sizes(cost))[: self.max_splits]

    def _seek(self, shape: Shape, max_cost: int) -> None:
        if max_cost < shape.least_cost:
            return
        cost = min(max_cost, max(shape.least_cost, shape.cost(self.guesser.size(shape))))
        too_few, step = shape.least_cost - 1, 1
        found = self._at(shape, cost)
        while found is None:
            if cost >= max_cost:
                return
            too_few, cost, step = cost, min(max_cost, cost + step), 2 * step
            found = self._at(shape, cost)
        self._cheaper(found, too_few)

    def _cheaper(self, found: Point, too_few: int) -> None:
        """Down from one that does, in growing steps until the first that does not; then halves of what is left."""
        step = 1
        while found.cost - too_few > 1:
            cost = max(too_few + 1, found.cost - step)
            better = self._at(found.shape, cost)
            if better is None:
                too_few = cost
                step = max(1, (found.cost - too_few) // 2)
            else:
                found, step = better, 2 * step

    def _at(self, shape: Shape, cost: int) -> Point | None:
        """One for at most so many devices that keeps the objectives."""
        points = [Point(shape, size) for size in self.sizes(shape, cost)]
        found = next((point for point in points if self.judge.keeps(point)), None)
        self._best = found or self._best
        return found
