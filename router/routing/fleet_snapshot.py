"""The workers of a fleet, ranked, so that a routing decision examines a few of thousands.

A pool is all workers of one model, identity and revision. It keeps three rankings, each by a number that follows from one
worker's snapshot and is updated with it: cost of decoding a request, cost of the whole request (aggregated), time to prefill a
prompt. Pure.
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
"""Workers are ranked for a request of this size. Others seldom differ so much that the best worker is not among the first few."""

FULL_RANK_S = 1e6
MAX_PRICE_S = 1e3
"""Limit of the seconds for a step or a token: a larger report cannot be true, and sums might overflow."""


class Ranking:
    """Order names by a number, the least first; equals by name.

    The numbers lie side by side in an array: a search among thousands touches a few cache lines, not a few dozen objects.
    """

    def __init__(self) -> None:
        self._ranks = array("d")
        self._names: list[str] = []
        self._rank: dict[str, float] = {}

    @property
    def names(self) -> Sequence[str]:
        """Return the names, the least number first."""
        return self._names

    def put(self, name: str, rank: float) -> None:
        """Insert or move a name. NaN and infinity rank last: they would break the order."""
        rank = rank if math.isfinite(rank) else sys.float_info.max
        if self._rank.get(name) != rank:
            self.drop(name)
            at = self._place(name, rank)
            self._rank[name] = rank
            self._ranks.insert(at, rank)
            self._names.insert(at, name)

    def drop(self, name: str) -> None:
        """Remove a name, if it is there."""
        rank = self._rank.pop(name, None)
        if rank is not None:
            at = self._place(name, rank)
            del self._ranks[at], self._names[at]

    def _place(self, name: str, rank: float) -> int:
        first = bisect_left(self._ranks, rank)
        return bisect_left(self._names, name, first, bisect_right(self._ranks, rank, first))


SURE_STEPS = 32
"""A worker with fewer measured steps gets the pool's mean speed: its first measurements may have been disturbed, and if it seemed
slow because of them, no request would go there to show otherwise."""


class Speeds:
    """Average the speeds that workers with enough steps report, for workers without."""

    def __init__(self) -> None:
        self._num_reports = 0
        self._sums = [0.0] * 5

    def count(self, model: LatencyModel | None, sign: int) -> None:
        """Add a worker's report, or with `sign` -1 remove it."""
        if model is None or model.num_steps < SURE_STEPS:
            return
        self._num_reports += sign
        sums = self._sums
        sums[0] += sign * model.fixed_s
        sums[1] += sign * model.per_prefill_token_s
        sums[2] += sign * model.per_prefill_context_s
        sums[3] += sign * model.per_sequence_s
        sums[4] += sign * model.per_context_token_s

    def believed(self, model: LatencyModel | None) -> LatencyModel:
        """Return the speed to assume for a worker that reports `model`."""
        if model is not None and (model.num_steps >= SURE_STEPS or self._num_reports == 0):
            return model
        if self._num_reports == 0:
            return NEUTRAL
        fixed_s, token_s, prefix_s, row_s, context_s = (max(0.0, total / self._num_reports) for total in self._sums)
        return LatencyModel(fixed_s, token_s, prefix_s, row_s, context_s)


class Pool:
    """Hold the workers of one model, identity and revision, by address. `aggregated_ranking`: decode workers, by the cost of
    LOCAL."""

    def __init__(self, model: str, identity: tuple[object, ...], revision: str = "") -> None:
        self.model, self.identity, self.revision = model, identity, revision
        self.estimates: dict[str, WorkerEstimate] = {}
        self.decode_ranking = Ranking()
        self.aggregated_ranking = Ranking()
        self.prefill_ranking = Ranking()
        self._num_busy = 0
        self._speeds = Speeds()

    @property
    def pressure(self) -> float:
        """Return the share of busy workers: it is what a second of a worker's time is worth to other requests."""
        return self._num_busy / len(self.estimates) if self.estimates else 0.0

    def put(self, view: WorkerSnapshot) -> None:
        """Insert or replace a worker."""
        before, speed = self.estimates.get(view.address), view.latency
        if before is not None:
            self._discount(before)
        self._speeds.count(speed, 1)
        estimate = self.estimates[view.address] = WorkerEstimate(view, self._speeds.believed(speed))
        self._num_busy += estimate.busy
        self._rank(estimate)

    def drop(self, address: str) -> None:
        """Remove a worker, if it is there."""
        estimate = self.estimates.pop(address, None)
        if estimate is not None:
            self._discount(estimate)
        for ranking in (self.decode_ranking, self.aggregated_ranking, self.prefill_ranking):
            ranking.drop(address)

    def _discount(self, estimate: WorkerEstimate) -> None:
        self._num_busy -= estimate.busy
        self._speeds.count(estimate.view.latency, -1)

    def _rank(self, estimate: WorkerEstimate) -> None:
        view, name = estimate.view, estimate.view.address
        prompt = estimate.prompt_side(TYPICAL_PROMPT, 0, view.figures_at)
        prefill_s = view.penalty_s + prompt.compute_s + prompt.rows * prompt.own_s
        if view.prefill:
            self.prefill_ranking.put(name, prefill_s)
        else:
            self.prefill_ranking.drop(name)
        if view.decode:
            output = estimate.output_side(TYPICAL_PROMPT, 0, 1, TYPICAL_OUTPUT, view.figures_at)
            decode_s = view.penalty_s + TYPICAL_OUTPUT * (output.tpot_s + output.rows * output.row_s)
            decode_s += FULL_RANK_S if estimate.free_tokens <= 0 or estimate.free_seqs <= 0 else 0.0
            self.decode_ranking.put(name, decode_s + output.queue_s)
            self.aggregated_ranking.put(name, decode_s + prefill_s)
        else:
            self.decode_ranking.drop(name)
            self.aggregated_ranking.drop(name)


class FleetSnapshot:
    """Hold all pools. Pure; `FleetRegistry` keeps it up to date."""

    def __init__(self, views: Iterable[WorkerSnapshot] = ()) -> None:
        self._pools: dict[tuple[str, tuple[object, ...], str], Pool] = {}
        self._pool_at: dict[str, Pool] = {}
        for view in views:
            self.put(view.address, view)

    def __len__(self) -> int:
        return len(self._pool_at)

    def put(self, address: str, view: WorkerSnapshot | None) -> None:
        """Replace the snapshot of the worker at `address`; None: it takes no work."""
        before = self._pool_at.get(address)
        pool = None if view is None else self._pool_for(view, before)
        if before is not None and before is not pool:
            self._forget(before, address)
        if view is not None and pool is not None:
            self._pool_at[address] = pool
            pool.put(view)

    @property
    def a_decode_worker(self) -> str | None:
        """Return the address of a worker that takes requests to decode; None if there is none. Loops over pools, not workers."""
        return next((pool.decode_ranking.names[0] for pool in self._pools.values() if pool.decode_ranking.names), None)

    def views(self) -> Iterator[WorkerSnapshot]:
        """Return the snapshots of all workers."""
        return (estimate.view for pool in self._pools.values() for estimate in pool.estimates.values())

    def pools(self, model: str, kind: tuple[object, ...] | None = None, revision: str | None = None) -> list[Pool]:
        """Return the pools that serve `model`; with a kind, only those of its identity, with a revision only those of it."""
        return [
            pool
            for pool in self._pools.values()
            if pool.model == model and (kind is None or pool.identity == kind[0]) and revision in (None, pool.revision)
        ]

    def get(self, address: str) -> WorkerEstimate | None:
        """Return the estimate of the worker at `address`; None if it takes no work."""
        pool = self._pool_at.get(address)
        return None if pool is None else pool.estimates[address]

    def pool_of(self, view: WorkerSnapshot) -> Pool:
        """Return the pool of a worker of this fleet."""
        return self._pools[view.model, view.identity, view.revision]

    def peers(self, view: WorkerSnapshot, *, prefill: bool) -> Iterator[WorkerSnapshot]:
        """Yield the workers of this worker's kind, of any revision, that prefill, else those that decode; itself included."""
        for pool in self.pools(view.model, (view.identity,)):
            for address in (pool.prefill_ranking if prefill else pool.decode_ranking).names:
                other = pool.estimates[address].view
                if other.layout.kv_dtype == view.layout.kv_dtype:
                    yield other

    def _pool_for(self, view: WorkerSnapshot, before: Pool | None) -> Pool:
        if (
            before is not None
            and before.identity is view.identity
            and before.model == view.model
            and before.revision == view.revision
        ):
            return before  # nearly always, and there are thousands of reports in a second
        key = (view.model, view.identity, view.revision)
        return self._pools.setdefault(key, Pool(*key))

    def _forget(self, pool: Pool, address: str) -> None:
        del self._pool_at[address]
        pool.drop(address)
        if not pool.estimates:
            del self._pools[pool.model, pool.identity, pool.revision]


def is_usable(model: LatencyModel) -> bool:
    """Return True if a prediction can use these numbers: none is negative or above MAX_PRICE_S."""
    steps_s = (model.fixed_s, model.per_sequence_s, model.per_context_token_s)
    prompts_s = (model.per_prefill_token_s, model.per_prefill_context_s)
    return all(0 <= price_s <= MAX_PRICE_S for price_s in (*steps_s, *prompts_s))
