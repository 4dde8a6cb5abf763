"""Finds the cheapest mesh that keeps the objectives, by simulating few candidates. Pure.

More workers never keep objectives for fewer requests: so of one shape, costs are bisected from the capacity estimate, and a size
is known to fail when a larger one did. At each cost the most promising splits between the pools are tried. A simulation ends as
soon as more requests have missed than may; of a long trace the busiest part, where most miss, comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.planner.meshes import Point, Shape, Size, WorkerKind
from pdmesh.planner.traffic import Traffic
from pdmesh.planner.trial import Outcome, simulate
from pdmesh.planning.capacity import DecodePool, Pool, PrefillPool, SharedPool, bearable, fewest
from pdmesh.planning.capacity_load import Goals, Load
from pdmesh.simulator.settings import MeshSettings

# The start of a search: capacity planning estimates how many workers each pool of a mesh needs.


MOST_WORKERS = 512
"""Largest planned pool."""


@dataclass
class Guesser:
    """Estimate for one load and its objectives. Capacity planning alone: bursts, hand-offs and admission are left to
    simulation."""

    load: Load
    goals: Goals
    _rates: dict[tuple[Pool, int], float] = field(default_factory=dict)
    _sizes: dict[Pool, int] = field(default_factory=dict)

    def size(self, shape: Shape) -> Size:
        """Return workers that should suffice; at most MOST_WORKERS, if none would."""
        prefill, decode = self._pools(shape)
        return Size(0 if prefill is None else self._fewest(prefill), self._fewest(decode))

    def ranked(self, shapes: Iterable[Shape]) -> list[Shape]:
        """Return the shapes, cheapest first; of equally cheap ones those with the highest rate first."""
        return sorted(shapes, key=lambda shape: (shape.cost(self.size(shape)), -self.rate(shape, self.size(shape))))

    def in_order(self, shape: Shape, sizes: Sequence[Size]) -> list[Size]:
        """Return the sizes, those with the highest rate first."""
        return list(sizes) if len(sizes) < 2 else sorted(sizes, key=lambda size: -self.rate(shape, size))

    def rate(self, shape: Shape, size: Size) -> float:
        """Return the requests a second that it should bear: the rate of the weaker pool."""
        prefill, decode = self._pools(shape)
        rates = [self._rate(decode, size.num_decode)]
        return min(rates if prefill is None else [*rates, self._rate(prefill, size.num_prefill)])

    def _rate(self, pool: Pool, num: int) -> float:
        if (pool, num) not in self._rates:
            self._rates[pool, num] = bearable(pool, self.load, num)
        return self._rates[pool, num]

    def _fewest(self, pool: Pool) -> int:
        if pool not in self._sizes:
            self._sizes[pool] = fewest(pool, self.load, MOST_WORKERS) or MOST_WORKERS
        return self._sizes[pool]

    def _pools(self, shape: Shape) -> tuple[PrefillPool | None, Pool]:
        if shape.prefill is None:
            return None, SharedPool(shape.decode.worker, self.goals)
        return PrefillPool(shape.prefill.worker, self.goals), DecodePool(shape.decode.worker, self.goals)


def shapes_of(kinds: Sequence[WorkerKind], *, aggregated: bool, separated: bool) -> list[Shape]:
    """Return all shapes of these kinds. Prefill workers differ by what they compute in a step, not by how many sequences."""
    shapes = [Shape(kind) for kind in kinds] if aggregated else []
    widest: dict[tuple[int, int], WorkerKind] = {}
    for kind in kinds:
        key = (kind.num_devices, kind.spec.max_num_batched_tokens)
        if key not in widest or kind.spec.max_num_seqs > widest[key].spec.max_num_seqs:
            widest[key] = kind
    return shapes + [Shape(kind, prefill) for kind in kinds for prefill in widest.values()] if separated else shapes


SCREEN_REQUESTS = 2000
"""Requests of the busiest part; a load of less than twice as many has none."""


class Spent(Exception):
    """Raised when the limit of simulated requests is reached."""


@dataclass
class Judge:
    """Judge whether meshes keep the objectives for a share `quantile` of the requests; remembers its results. `max_requests`: to
    simulate before it gives up."""

    traffic: Traffic
    settings: MeshSettings
    quantile: float
    max_requests: int
    num_requests: int = 0
    num_runs: int = 0
    outcomes: dict[Point, Outcome] = field(default_factory=dict)
    _kept: dict[Point, bool] = field(default_factory=dict)

    def keeps(self, point: Point) -> bool:
        """Return whether the mesh keeps the objectives. Raises Spent."""
        known = self._kept.get(point)
        if known is None:
            known = self._implied(point)
        if known is None:
            known = self._kept[point] = self._try(point)
        return known

    def outcome(self, point: Point) -> Outcome:
        """Return the outcome of the whole load, at any cost."""
        if point not in self.outcomes:
            found = self._run(point, self.traffic, None)
            assert found is not None
            self.outcomes[point] = found
        return self.outcomes[point]

    @property
    def _max_misses(self) -> int:
        """Return the allowed misses of all requests; rounding must not forbid an allowed share."""
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
        """Return what is implied by a larger or smaller mesh of the same shape."""
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
    """Search. `max_splits`: sizes that are tried at one cost."""

    judge: Judge
    guesser: Guesser
    max_splits: int
    is_spent: bool = False
    _best: Point | None = None

    def cheapest(self, shapes: Sequence[Shape], max_cost: int) -> Point | None:
        """Return the cheapest of all shapes, in this order: a later one must be cheaper. None: none within the cost, or none
        before the limit was reached."""
        self._best = None
        try:
            for shape in shapes:
                self._seek(shape, max_cost if self._best is None else self._best.cost - 1)
        except Spent:
            self.is_spent = True
        return self._best

    def sizes(self, shape: Shape, cost: int) -> list[Size]:
        """Return the sizes to try at a cost, the most promising first."""
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
        """Search downwards from one that does, in growing steps until the first that does not; then bisect."""
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
        """Return a size within the cost that keeps the objectives."""
        points = [Point(shape, size) for size in self.sizes(shape, cost)]
        found = next((point for point in points if self.judge.keeps(point)), None)
        self._best = found or self._best
        return found
