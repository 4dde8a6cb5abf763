"""Makes a plan: the cheapest mesh, its expected performance, and that of a smaller or another kind of mesh. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.planner.meshes import AGGREGATED, SEPARATED, Point, Shape, Size, WorkerKind
from pdmesh.planner.search import SCREEN_REQUESTS, Guesser, Judge, Search, shapes_of
from pdmesh.planner.traffic import Traffic
from pdmesh.planner.trial import Outcome, simulate
from pdmesh.planning.capacity_load import Goals
from pdmesh.simulator.settings import MeshSettings

# The lower bound of latency that no number of workers can improve: requests alone on idle workers.


@dataclass(frozen=True)
class Floor:
    """Hold the bound of one kind of worker. `attainable`: the share of requests that keep both objectives alone; the rest is at
    the objectives' quantile: TTFT and TPOT in seconds, and the lengths that they come from, in tokens."""

    kind: WorkerKind
    attainable: float
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    context_tokens: int


def floor_of(kind: WorkerKind, traffic: Traffic, settings: MeshSettings, quantile: float) -> Floor:
    """Return the bound. `settings` has the objectives and the network times between processes."""
    goal = settings.objective
    assert goal is not None
    transit_s = settings.router_s + 2 * settings.call_s
    speed, chunk = kind.spec.speed, kind.spec.max_num_batched_tokens
    pairs = list(zip(traffic.arrivals, traffic.uncached, strict=True))
    ttfts = [transit_s + speed.prefill_s(a.num_input - own, a.num_input, chunk=chunk) for a, own in pairs]
    contexts = [a.num_input + a.num_output // 2 if a.num_output > 1 else 0 for a, _ in pairs]
    tpots = [kind.spec.drafts.token_s(speed, 1, speed.decode_s(1, context)) if context else 0.0 for context in contexts]
    num_kept = sum(t <= goal.ttft_ms / 1e3 and p <= goal.tpot_ms / 1e3 for t, p in zip(ttfts, tpots, strict=True))
    return Floor(
        kind,
        num_kept / len(pairs),
        _quantile(ttfts, quantile),
        _quantile(tpots, quantile),
        int(_quantile([own for _, own in pairs], quantile)),
        int(_quantile(contexts, quantile)),
    )


def why_impossible(floor: Floor, settings: MeshSettings, quantile: float) -> str:
    """Return the reason in words, for the kind of worker that comes closest."""
    goal, share = settings.objective, f"{100 * quantile:g} %"
    assert goal is not None
    reasons = []
    if floor.ttft_s * 1e3 > goal.ttft_ms:
        parts = _parts(floor.kind, floor.prompt_tokens, 0)
        reasons.append(f"a prompt of {floor.prompt_tokens} tokens takes {floor.ttft_s * 1e3:.0f} ms to its first token, {parts}")
    if floor.tpot_s * 1e3 > goal.tpot_ms:
        parts = _parts(floor.kind, 0, floor.context_tokens)
        reasons.append(f"a token behind {floor.context_tokens} others takes {floor.tpot_s * 1e3:.1f} ms, {parts}")
    if not reasons:
        reasons.append("each objective by itself is missed by too many")
    return (
        f"no number of workers keeps TTFT {goal.ttft_ms} ms and TPOT {goal.tpot_ms} ms for {share} of these requests: alone on "
        f"an idle worker ({floor.kind.name}) {100 * floor.attainable:.1f} % do; at the {share} mark " + ", and ".join(reasons)
    )


def closest(kinds: Sequence[WorkerKind], traffic: Traffic, settings: MeshSettings, quantile: float) -> Floor:
    """Return the bound of the first kind that keeps the objectives; of the one that comes closest, if none does."""
    floors = []
    for kind in kinds:
        floors.append(floor_of(kind, traffic, settings, quantile))
        if floors[-1].attainable >= quantile:
            break
    return max(floors, key=lambda floor: (floor.attainable, -floor.ttft_s, -floor.tpot_s))


def _parts(kind: WorkerKind, num_prompt: int, context: int) -> str:
    """Return the parts of the time, longest first."""
    if kind.roofline is None:
        return "as measured"
    parts = kind.roofline.decode_parts(1, context) if context else kind.roofline.prefill_parts(num_prompt)
    named = sorted(parts.items(), key=lambda part: -part[1])
    return "of which " + ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in named[:2])


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


Say = Callable[[str], None]
OVER_GUESS, SPARE_DEVICES = 4, 8
"""Bounds of a search without a budget: a multiple of the devices that capacity planning asks for, and some more."""


class NoPlan(Exception):
    """Raised when nothing keeps the objectives: why, and what to do."""


@dataclass(frozen=True)
class Effort:
    """Bound the search. `shapes` of each kind of mesh that are searched, `splits` that are tried at one cost, requests that may
    be simulated before the search ends, and `around`: costs above the chosen one that are simulated for the picture."""

    shapes: int
    splits: int
    max_requests: int
    around: tuple[float, ...]


EFFORTS = {
    "quick": Effort(1, 2, 50_000, ()),
    "normal": Effort(2, 3, 100_000, (0.5,)),
    "thorough": Effort(5, 12, 600_000, (0.4, 0.6, 0.8, 1.25, 1.5)),
}


@dataclass(frozen=True)
class Task:
    """Describe what is to be planned. `headroom`: the share by which the load may be higher. `meshes`: AGGREGATED, SEPARATED or
    both. `max_cost`: devices; 0: no bound. `settings` hold the objective."""

    traffic: Traffic
    kinds: tuple[WorkerKind, ...]
    settings: MeshSettings
    quantile: float
    headroom: float
    meshes: tuple[str, ...]
    max_cost: int
    effort: Effort

    @property
    def goals(self) -> Goals:
        """Return the goals for capacity planning."""
        goal = self.settings.objective
        assert goal is not None
        return goals_of(goal.ttft_ms, goal.tpot_ms, self.quantile, self.settings)


@dataclass(frozen=True)
class Tried:
    """Hold a mesh and its outcome under the planned load."""

    point: Point
    outcome: Outcome


@dataclass(frozen=True)
class Plan:
    """Hold the plan. `chosen` and all others bore the load with headroom; `expected`: the chosen one with the load as it is.
    `fewer`: the best with a worker less, None if there is none. `best`: of each kind of mesh the cheapest that does, None if none
    was found. `seen`: every mesh that was simulated to the end."""

    task: Task
    chosen: Tried
    expected: Outcome
    fewer: Tried | None
    best: dict[str, Tried | None]
    seen: tuple[Tried, ...]
    num_runs: int
    num_requests: int
    is_spent: bool


def goals_of(ttft_ms: int, tpot_ms: int, quantile: float, settings: MeshSettings) -> Goals:
    """Return the goals. `settings`: the times outside the workers."""
    return Goals(ttft_ms / 1e3, tpot_ms / 1e3, quantile, transit_s=settings.router_s + 2 * settings.call_s)


def make_plan(task: Task, say: Say = lambda _: None) -> Plan:
    """Return a plan; `say` receives the progress. Raises NoPlan."""
    floor = closest(task.kinds, task.traffic, task.settings, task.quantile)
    if floor.attainable < task.quantile:
        raise NoPlan(why_impossible(floor, task.settings, task.quantile) + "; relax an objective, or choose a faster device")
    planner = _Planner(task, say)
    best = {mesh: planner.cheapest(mesh) for mesh in task.meshes}
    found = [tried for tried in best.values() if tried is not None]
    if not found:
        raise NoPlan(planner.why_none())
    chosen = min(found, key=lambda tried: (tried.point.cost, -tried.outcome.attainment))
    return planner.finish(chosen, best)


class _Planner:
    """Run one search."""

    def __init__(self, task: Task, say: Say) -> None:
        self._task, self._say = task, say
        load = task.traffic.faster(1 + task.headroom)
        self._judge = Judge(load, task.settings, task.quantile, task.effort.max_requests)
        self._guesser = Guesser(load.busiest(SCREEN_REQUESTS).load, task.goals)
        self._search = Search(self._judge, self._guesser, task.effort.splits)
        shapes = shapes_of(task.kinds, aggregated=AGGREGATED in task.meshes, separated=SEPARATED in task.meshes)
        ranked = self._guesser.ranked(shapes)
        self._shapes = {mesh: [shape for shape in ranked if shape.mesh == mesh] for mesh in task.meshes}
        self._max_cost = task.max_cost or self._enough(ranked[0])

    def cheapest(self, mesh: str) -> Tried | None:
        """Return the cheapest mesh of one kind."""
        point = self._search.cheapest(self._shapes[mesh][: self._task.effort.shapes], self._max_cost)
        named = "none" if point is None else f"{point.cost} devices: {point.name}"
        self._say(f"{mesh}: {named} ({self._judge.num_runs} simulations of {self._judge.num_requests} requests so far)")
        return None if point is None else self._tried(point)

    def why_none(self) -> str:
        """Return the reason in words."""
        if self._search.is_spent:
            return "the search ended before it found a mesh that keeps the objectives; give a higher --effort"
        tried = [self._tried(self._largest(shapes[0])) for shapes in self._shapes.values() if shapes]
        best = max(tried, key=lambda each: each.outcome.attainment)
        return (
            f"no mesh of at most {self._max_cost} devices keeps the objectives; the best, {best.point.name}, does for "
            f"{best.outcome.attainment:.2%}; raise --gpus or relax an objective"
        )

    def finish(self, chosen: Tried, best: dict[str, Tried | None]) -> Plan:
        """Return the plan, after simulating what it compares with."""
        task, judge = self._task, self._judge
        expected = chosen.outcome
        if task.headroom:
            self._say("the chosen mesh under the load as it is")
            found = simulate(chosen.point, task.traffic.arrivals, task.settings)
            assert found is not None
            expected = found
        self._say("what a worker less would do, and meshes around it")
        fewer = [self._tried(Point(chosen.point.shape, size)) for size in _one_less(chosen.point)]
        for mesh, tried in best.items():
            self._look_around(tried.point if tried else self._largest(self._shapes[mesh][0]), chosen.point.cost)
        return Plan(
            task,
            chosen,
            expected,
            max(fewer, key=lambda each: each.outcome.attainment, default=None),
            best,
            tuple(Tried(point, outcome) for point, outcome in judge.outcomes.items()),
            judge.num_runs,
            judge.num_requests,
            self._search.is_spent,
        )

    def _look_around(self, point: Point, cost: int) -> None:
        """Simulate the same shape for other numbers of devices."""
        costs = {round(share * cost) for share in self._task.effort.around} | {point.cost - 1, point.cost + 1}
        for each in sorted(costs):
            if point.shape.least_cost <= each <= self._max_cost:
                self._tried(Point(point.shape, self._search.sizes(point.shape, each)[0]))

    def _largest(self, shape: Shape) -> Point:
        """Return the largest allowed mesh."""
        return Point(shape, self._search.sizes(shape, max(shape.least_cost, self._max_cost))[0])

    def _enough(self, shape: Shape) -> int:
        return OVER_GUESS * shape.cost(self._guesser.size(shape)) + SPARE_DEVICES

    def _tried(self, point: Point) -> Tried:
        return Tried(point, self._judge.outcome(point))


def _one_less(point: Point) -> list[Size]:
    """Return the sizes with one worker less in either pool, where there are more."""
    prefill, decode = point.size.num_prefill, point.size.num_decode
    sizes = [Size(prefill - 1, decode)] if prefill > 1 else []
    return [*sizes, Size(prefill, decode - 1)] if decode > 1 else sizes
