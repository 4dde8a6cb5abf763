"""The workers of a fleet, in the order in which a policy wants to look at them: a decision looks at a few of thousands.

A group is all workers of one model and identity. In it, three rankings by a number that a view alone decides, updated when the
view changes: who would own a request most cheaply, who would do all of it, who would compute a prompt soonest. Pure.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from planning.latency_model import LatencyModel
from router.prediction import NEUTRAL, Engine
from router.views import WorkerView

TYPICAL_PROMPT = 512
TYPICAL_OUTPUT = 128.0
"""What a worker is ranked for. Requests differ, but seldom so much that the best worker is not among the first few."""

FULL_RANK_S = 1e6


class Ranking:
    """Names by a number, the least first."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, str]] = []
        self._rank: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def entries(self) -> Sequence[tuple[float, str]]:
        """(number, name), the least first."""
        return self._sorted

    def put(self, name: str, rank: float) -> None:
        """Insert, or move."""
        if self._rank.get(name) != rank:
            self.drop(name)
            self._rank[name] = rank
            insort(self._sorted, (rank, name))

    def drop(self, name: str) -> None:
        """Take out, if it is there."""
        rank = self._rank.pop(name, None)
        if rank is not None:
            del self._sorted[bisect_left(self._sorted, (rank, name))]


class Group:
    """Workers of one model and identity, by address."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.owners = Ranking()
        self.wholes = Ranking()
        self.fillers = Ranking()
        self._num_busy = 0
        self._num_told = 0
        self._told: tuple[float, ...] = (0.0,) * 5

    @property
    def pressure(self) -> float:
        """The share of the workers that have something to do: what a second of a worker's time is worth to others."""
        return self._num_busy / len(self.engines) if self.engines else 0.0

    def put(self, view: WorkerView) -> None:
        """Insert, or replace."""
        self.drop(view.address)
        self._count(view, 1)
        engine = Engine(view, view.latency or self._average())
        self.engines[view.address] = engine
        self._num_busy += engine.busy
        self._rank(engine)

    def drop(self, address: str) -> None:
        """Take out, if it is there. The rankings follow in `put`, if the worker comes back."""
        engine = self.engines.pop(address, None)
        if engine is not None:
            self._num_busy -= engine.busy
            self._count(engine.view, -1)

    def forget(self, address: str) -> None:
        """Take out for good."""
        self.drop(address)
        for ranking in (self.owners, self.wholes, self.fillers):
            ranking.drop(address)

    def _rank(self, engine: Engine) -> None:
        view, rows = engine.view, engine.rows
        prompt = engine.prompt_side(TYPICAL_PROMPT, 0, view.figures_at)
        output = engine.output_side(TYPICAL_PROMPT, 0, 1, TYPICAL_OUTPUT, view.figures_at)
        fill_s = view.penalty_s + prompt.compute_s + rows * prompt.own_s
        own_s = view.penalty_s + TYPICAL_OUTPUT * (output.tpot_s + output.rows * output.row_s)
        own_s += FULL_RANK_S if _is_full(view) else 0.0
        _keep(self.owners, view.decode, view.address, own_s + output.queue_s)
        _keep(self.wholes, view.decode, view.address, own_s + fill_s)
        _keep(self.fillers, view.prefill, view.address, fill_s)

    def _average(self) -> LatencyModel:
        """Of those that say how fast they are."""
        if self._num_told == 0:
            return NEUTRAL
        fixed_s, token_s, prefix_s, row_s, context_s = (max(0.0, total / self._num_told) for total in self._told)
        return LatencyModel(fixed_s, token_s, prefix_s, row_s, context_s)

    def _count(self, view: WorkerView, sign: int) -> None:
        if view.latency is not None:
            self._num_told += sign
            self._told = tuple(total + sign * value for total, value in zip(self._told, _parameters(view.latency), strict=True))


class Roster:
    """All groups. Pure; `Fleet` keeps it up to date."""

    def __init__(self, views: Iterable[WorkerView] = ()) -> None:
        self._groups: dict[tuple[object, ...], Group] = {}
        self._group_of: dict[str, tuple[object, ...]] = {}
        self._block_sizes: Counter[int] = Counter()
        for view in views:
            self.put(view.address, view)

    def __len__(self) -> int:
        return len(self._group_of)

    def put(self, address: str, view: WorkerView | None) -> None:
        """The view of the worker at `address` is this now; None: it takes no work."""
        self._count_block_sizes(self.get(address), view)
        key = None if view is None else (view.model, view.identity)
        before = self._group_of.pop(address, None)
        if before is not None and before != key:
            self._forget(before, address)
        if view is not None and key is not None:
            self._group_of[address] = key
            self._groups.setdefault(key, Group()).put(view)

    def views(self) -> Iterator[WorkerView]:
        """Everybody."""
        return (engine.view for group in self._groups.values() for engine in group.engines.values())

    def groups(self, model: str, kind: tuple[object, ...] | None = None) -> list[Group]:
        """Those that serve `model`; with a kind, those of its identity."""
        return [
            group for (name, identity), group in self._groups.items() if name == model and (kind is None or identity == kind[0])
        ]

    def get(self, address: str) -> Engine | None:
        """The worker there; None if it takes no work."""
        key = self._group_of.get(address)
        return None if key is None else self._groups[key].engines[address]

    def group_of(self, view: WorkerView) -> Group:
        """The group of a worker of this roster."""
        return self._groups[(view.model, view.identity)]

    @property
    def block_sizes(self) -> set[int]:
        """In tokens, of everybody."""
        return set(self._block_sizes)

    def _count_block_sizes(self, before: Engine | None, after: WorkerView | None) -> None:
        if before is not None:
            self._block_sizes[before.view.block_size] -= 1
        if after is not None:
            self._block_sizes[after.block_size] += 1
        self._block_sizes = +self._block_sizes

    def _forget(self, key: tuple[object, ...], address: str) -> None:
        group = self._groups[key]
        group.forget(address)
        if not group.engines:
            del self._groups[key]


def _keep(ranking: Ranking, belongs: bool, name: str, rank: float) -> None:
    if belongs:
        ranking.put(name, rank)
    else:
        ranking.drop(name)


def _is_full(view: WorkerView) -> bool:
    """It has no place for a sequence of any length: it is looked at last."""
    no_blocks = view.num_free_blocks <= view.dispatched_blocks
    return no_blocks or view.num_seqs + view.dispatched_seqs >= view.max_num_seqs


def _parameters(model: LatencyModel) -> tuple[float, ...]:
    return (
        model.fixed_s,
        model.per_prefill_token_s,
        model.per_prefill_context_s,
        model.per_sequence_s,
        model.per_context_token_s,
    )


def is_usable(model: LatencyModel) -> bool:
    """Numbers that a prediction can be made of: finite and not negative."""
    return all(math.isfinite(value) and value >= 0 for value in _parameters(model))
