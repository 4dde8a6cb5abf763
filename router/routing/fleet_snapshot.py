"""The workers of a fleet, in the order in which a policy wants to look at them: a decision looks at a few of thousands.

A group is all workers of one model and identity. In it, three rankings by a number that a view alone decides, updated when the
view changes: who would own a request most cheaply, who would do all of it, who would compute a prompt soonest. Pure.
"""

import math
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from pdmesh.planning.latency_model import LatencyModel
from router.routing.cost_model import NEUTRAL, WorkerEstimate
from router.routing.worker_snapshot import WorkerSnapshot

TYPICAL_PROMPT = 512
TYPICAL_OUTPUT = 128.0
"""What a worker is ranked for. Requests differ, but seldom so much that the best worker is not among the first few."""

FULL_RANK_S = 1e6
MAX_PRICE_S = 1e3
"""Of a step or a token: beyond it a worker says nothing that could be true, and sums might overflow."""


class Ranking:
    """Names by a number, the least first; equals by name.

    The numbers lie side by side in an array: a search among thousands touches a few cache lines, not a few dozen objects.
    """

    def __init__(self) -> None:
        self._ranks = array("d")
        self._names: list[str] = []
        self._rank: dict[str, float] = {}

    @property
    def names(self) -> Sequence[str]:
        """The least first."""
        return self._names

    def put(self, name: str, rank: float) -> None:
        """Insert, or move. What is no number goes last: it would put the others out of order."""
        rank = rank if math.isfinite(rank) else sys.float_info.max
        if self._rank.get(name) != rank:
            self.drop(name)
            at = self._place(name, rank)
            self._rank[name] = rank
            self._ranks.insert(at, rank)
            self._names.insert(at, name)

    def drop(self, name: str) -> None:
        """Take out, if it is there."""
        rank = self._rank.pop(name, None)
        if rank is not None:
            at = self._place(name, rank)
            del self._ranks[at], self._names[at]

    def _place(self, name: str, rank: float) -> int:
        first = bisect_left(self._ranks, rank)
        return bisect_left(self._names, name, first, bisect_right(self._ranks, rank, first))


SURE_STEPS = 32
"""A worker that has done fewer is believed less than those that have: a measurement at its start may have been disturbed, and who
is taken for slow because of it would never be asked to do a step that shows otherwise."""


class Speeds:
    """What workers that have done some steps say of their speed, as a mean for those that have not."""

    def __init__(self) -> None:
        self._num_told = 0
        self._sums = [0.0] * 5

    def count(self, model: LatencyModel | None, sign: int) -> None:
        """One more says this, or with `sign` -1 does no longer."""
        if model is None or model.num_steps < SURE_STEPS:
            return
        self._num_told += sign
        sums = self._sums
        sums[0] += sign * model.fixed_s
        sums[1] += sign * model.per_prefill_token_s
        sums[2] += sign * model.per_prefill_context_s
        sums[3] += sign * model.per_sequence_s
        sums[4] += sign * model.per_context_token_s

    def believed(self, model: LatencyModel | None) -> LatencyModel:
        """What to take for the speed of a worker that says this."""
        if model is not None and (model.num_steps >= SURE_STEPS or self._num_told == 0):
            return model
        if self._num_told == 0:
            return NEUTRAL
        fixed_s, token_s, prefix_s, row_s, context_s = (max(0.0, total / self._num_told) for total in self._sums)
        return LatencyModel(fixed_s, token_s, prefix_s, row_s, context_s)


class Pool:
    """Workers of one model and identity, by address."""

    def __init__(self, model: str, identity: tuple[object, ...]) -> None:
        self.model, self.identity = model, identity
        self.engines: dict[str, WorkerEstimate] = {}
        self.owners = Ranking()
        self.wholes = Ranking()
        self.fillers = Ranking()
        self._num_busy = 0
        self._speeds = Speeds()

    @property
    def pressure(self) -> float:
        """The share of the workers that have something to do: what a second of a worker's time is worth to others."""
        return self._num_busy / len(self.engines) if self.engines else 0.0

    def put(self, view: WorkerSnapshot) -> None:
        """Insert, or replace."""
        before, speed = self.engines.get(view.address), view.latency
        if before is not None:
            self._discount(before)
        self._speeds.count(speed, 1)
        engine = self.engines[view.address] = WorkerEstimate(view, self._speeds.believed(speed))
        self._num_busy += engine.busy
        self._rank(engine)

    def drop(self, address: str) -> None:
        """Take out, if it is there."""
        engine = self.engines.pop(address, None)
        if engine is not None:
            self._discount(engine)
        for ranking in (self.owners, self.wholes, self.fillers):
            ranking.drop(address)

    def _discount(self, engine: WorkerEstimate) -> None:
        self._num_busy -= engine.busy
        self._speeds.count(engine.view.latency, -1)

    def _rank(self, engine: WorkerEstimate) -> None:
        view, name = engine.view, engine.view.address
        prompt = engine.prompt_side(TYPICAL_PROMPT, 0, view.figures_at)
        fill_s = view.penalty_s + prompt.compute_s + prompt.rows * prompt.own_s
        if view.prefill:
            self.fillers.put(name, fill_s)
        else:
            self.fillers.drop(name)
        if view.decode:
            output = engine.output_side(TYPICAL_PROMPT, 0, 1, TYPICAL_OUTPUT, view.figures_at)
            own_s = view.penalty_s + TYPICAL_OUTPUT * (output.tpot_s + output.rows * output.row_s)
            own_s += FULL_RANK_S if engine.free_tokens <= 0 or engine.free_seqs <= 0 else 0.0
            self.owners.put(name, own_s + output.queue_s)
            self.wholes.put(name, own_s + fill_s)
        else:
            self.owners.drop(name)
            self.wholes.drop(name)


class FleetSnapshot:
    """All groups. Pure; `Fleet` keeps it up to date."""

    def __init__(self, views: Iterable[WorkerSnapshot] = ()) -> None:
        self._groups: dict[tuple[str, tuple[object, ...]], Pool] = {}
        self._group_of: dict[str, Pool] = {}
        for view in views:
            self.put(view.address, view)

    def __len__(self) -> int:
        return len(self._group_of)

    def put(self, address: str, view: WorkerSnapshot | None) -> None:
        """The view of the worker at `address` is this now; None: it takes no work."""
        before = self._group_of.get(address)
        group = None if view is None else self._group_for(view, before)
        if before is not None and before is not group:
            self._forget(before, address)
        if view is not None and group is not None:
            self._group_of[address] = group
            group.put(view)

    @property
    def owned(self) -> bool:
        """Is there anybody who owns requests?"""
        return any(group.owners.names for group in self._groups.values())

    def views(self) -> Iterator[WorkerSnapshot]:
        """Everybody."""
        return (engine.view for group in self._groups.values() for engine in group.engines.values())

    def groups(self, model: str, kind: tuple[object, ...] | None = None) -> list[Pool]:
        """Those that serve `model`; with a kind, those of its identity."""
        return [group for group in self._groups.values() if group.model == model and (kind is None or group.identity == kind[0])]

    def get(self, address: str) -> WorkerEstimate | None:
        """The worker there; None if it takes no work."""
        group = self._group_of.get(address)
        return None if group is None else group.engines[address]

    def group_of(self, view: WorkerSnapshot) -> Pool:
        """The group of a worker of this roster."""
        return self._groups[(view.model, view.identity)]

    def peers(self, view: WorkerSnapshot, *, prefill: bool) -> Iterator[WorkerSnapshot]:
        """All of the kind of this worker of the roster that prefill, else that decode; itself included."""
        group = self.group_of(view)
        for address in (group.fillers if prefill else group.owners).names:
            other = group.engines[address].view
            if other.layout.kv_dtype == view.layout.kv_dtype:
                yield other

    def _group_for(self, view: WorkerSnapshot, before: Pool | None) -> Pool:
        if before is not None and before.identity is view.identity and before.model == view.model:
            return before  # nearly always, and there are thousands of reports in a second
        return self._groups.setdefault((view.model, view.identity), Pool(view.model, view.identity))

    def _forget(self, group: Pool, address: str) -> None:
        del self._group_of[address]
        group.drop(address)
        if not group.engines:
            del self._groups[group.model, group.identity]


def is_usable(model: LatencyModel) -> bool:
    """Numbers that a prediction can be made of: not negative, and no more than MAX_PRICE_S."""
    steps_s = (model.fixed_s, model.per_sequence_s, model.per_context_token_s)
    prompts_s = (model.per_prefill_token_s, model.per_prefill_context_s)
    return all(0 <= price_s <= MAX_PRICE_S for price_s in (*steps_s, *prompts_s))
