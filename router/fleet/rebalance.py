"""Whether one running sequence should move to another decode worker. Pure: a snapshot and a clock in, a move with its reason out.

Moving costs a hand-off, so it is rare: a worker must have been in need for `patience_s` without a break, another one of its kind
must be much less loaded (`gap`), there is one move in `period_s`, and who has just given or taken a sequence is left alone.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from router.routing.worker_snapshot import WorkerKey, WorkerView


@dataclass(frozen=True)
class RebalanceLimits:
    """Shares are of a worker's blocks or places, whichever is fuller; times are seconds."""

    full: float = 0.9
    gap: float = 0.35
    patience_s: float = 2.0
    period_s: float = 1.0
    cooldown_s: float = 5.0
    tpot_gap: float = 0.6  # the other one's TPOT, as a share of the TPOT that breaks the objective


@dataclass(frozen=True)
class Pace:
    """Seconds per token that a decode worker's sequences get now, and the strictest objective among them (None: none)."""

    tpot_s: float
    objective_s: float | None = None


@dataclass(frozen=True)
class Move:
    """One sequence from `source` to `target`, or wherever the policy would rather have it."""

    source: WorkerKey
    target: WorkerKey
    reason: str


@dataclass(eq=False)
class Rebalancer:
    """Remembers who is in need since when, and when what was last moved."""

    limits: RebalanceLimits = field(default_factory=RebalanceLimits)
    _needy_since: dict[WorkerKey, float] = field(default_factory=dict)
    _moved_at: dict[WorkerKey, float] = field(default_factory=dict)
    _last_move_at: float | None = None

    def decide(self, workers: Iterable[WorkerView], paces: Mapping[WorkerKey, Pace], now: float) -> Move | None:
        """To be called with every change or a few times a second. A move that is returned counts as made."""
        decodes = [worker for worker in workers if worker.decode]
        emptiest = _emptiest_by_kind(decodes)
        needs = {worker.key: need for worker in decodes if (need := self._need(worker, emptiest[worker.kind], paces)) is not None}
        self._needy_since = {key: self._needy_since.get(key, now) for key in needs}
        self._moved_at = {key: at for key, at in self._moved_at.items() if now - at < self.limits.cooldown_s}
        if self._last_move_at is not None and now - self._last_move_at < self.limits.period_s:
            return None
        ripe = [need for key, need in needs.items() if self._is_ripe(key, need.target, now)]
        if not ripe:
            return None
        move = min(ripe, key=lambda need: (self._needy_since[need.source], need.source))
        self._last_move_at = self._moved_at[move.source] = self._moved_at[move.target] = now
        return move

    def _is_ripe(self, source: WorkerKey, target: WorkerKey, now: float) -> bool:
        waited = now - self._needy_since[source] >= self.limits.patience_s
        return waited and source not in self._moved_at and target not in self._moved_at

    def _need(self, worker: WorkerView, emptiest: list[WorkerView], paces: Mapping[WorkerKey, Pace]) -> Move | None:
        target = next((other for other in emptiest if other.key != worker.key), None)
        if target is None or worker.num_seqs < 2:  # a lone sequence is nowhere better off
            return None
        used, free = load_share(worker), load_share(target)
        if used - free >= self.limits.gap and used >= self.limits.full:
            return Move(worker.key, target.key, f"{worker.worker_id} is {used:.0%} full, {target.worker_id} {free:.0%}")
        return self._slow(worker, target, paces) if used > free else None

    def _slow(self, worker: WorkerView, target: WorkerView, paces: Mapping[WorkerKey, Pace]) -> Move | None:
        pace, other = paces.get(worker.key), paces.get(target.key)
        if pace is None or pace.objective_s is None or pace.tpot_s <= pace.objective_s:
            return None
        is_idle = target.num_seqs + target.dispatched_seqs == 0
        if not is_idle and (other is None or other.tpot_s > self.limits.tpot_gap * pace.tpot_s):
            return None
        slow = f"{pace.tpot_s * 1000:.0f} ms per token, the objective is {pace.objective_s * 1000:.0f}"
        return Move(worker.key, target.key, f"{worker.worker_id} gives {slow}; {target.worker_id} is faster")


def _emptiest_by_kind(workers: Iterable[WorkerView]) -> dict[tuple[object, ...], list[WorkerView]]:
    """The two least loaded of each kind: one of them is not the worker that looks for another."""
    kinds: dict[tuple[object, ...], list[WorkerView]] = {}
    for worker in workers:
        kinds.setdefault(worker.kind, []).append(worker)
    return {kind: heapq.nsmallest(2, those, key=lambda each: (load_share(each), each.address)) for kind, those in kinds.items()}


def load_share(worker: WorkerView) -> float:
    """How full it is, in blocks or in places, with what was sent there since its report."""
    blocks = 1 - (worker.num_free_blocks - worker.dispatched_blocks) / worker.num_total_blocks
    places = (worker.num_seqs + worker.dispatched_seqs) / worker.max_num_seqs
    return max(blocks, places)
