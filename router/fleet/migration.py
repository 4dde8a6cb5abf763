"""Migration decides which running requests move to another decode worker: all of a worker that drains, and one now and then when
loads differ much.

router/lifecycle/decode_stage.py moves a request: it prepares the next placement while the present one goes on, so that the client
does not wait. This module decides which requests move, and how many at once: each move is a hand-off that costs other requests
time.
"""

import asyncio
import heapq
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdmesh.v1 import worker_pb2
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot

# Rebalancing: whether one running sequence should move to another decode worker. Pure: it maps a snapshot and a clock to a move
# with its reason.
#
# A move costs a hand-off, so moves are rare: a worker must have been overloaded for `patience_s` without a break, another worker
# of its kind must be much less loaded (`gap`), there is one move in `period_s`, and a worker that has just given or taken a
# sequence is left alone.


@dataclass(frozen=True)
class RebalanceLimits:
    """Hold the limits. Shares are of a worker's blocks or sequence slots, whichever is fuller; times are seconds."""

    full: float = 0.9
    gap: float = 0.35
    patience_s: float = 2.0
    period_s: float = 1.0
    cooldown_s: float = 5.0
    tpot_gap: float = 0.6  # the target's TPOT, as a share of the TPOT that misses the objective


@dataclass(frozen=True)
class WorkerTpot:
    """Hold the TPOT of a decode worker's sequences now, and the strictest objective among them (None: none)."""

    tpot_s: float
    objective_s: float | None = None


@dataclass(frozen=True)
class Move:
    """Name a move of one sequence from `source` to `target`; the policy may choose another target."""

    source: WorkerKey
    target: WorkerKey
    reason: str


@dataclass(eq=False)
class Rebalancer:
    """Remember since when workers are overloaded, and which ones moved a sequence lately."""

    limits: RebalanceLimits = field(default_factory=RebalanceLimits)
    _overloaded_since: dict[WorkerKey, float] = field(default_factory=dict)
    _moved_at: dict[WorkerKey, float] = field(default_factory=dict)
    _last_move_at: float | None = None

    def decide(self, workers: Iterable[WorkerSnapshot], tpots: Mapping[WorkerKey, WorkerTpot], now: float) -> Move | None:
        """Return the next move, which counts as made. Call it at every change, or a few times a second."""
        decodes = [worker for worker in workers if worker.decode]
        emptiest = _emptiest_by_kind(decodes)
        moves = {each.key: found for each in decodes if (found := self._move(each, emptiest[_group(each)], tpots)) is not None}
        self._overloaded_since = {key: self._overloaded_since.get(key, now) for key in moves}
        self._moved_at = {key: at for key, at in self._moved_at.items() if now - at < self.limits.cooldown_s}
        if self._last_move_at is not None and now - self._last_move_at < self.limits.period_s:
            return None
        due = [move for key, move in moves.items() if self._is_due(key, move.target, now)]
        if not due:
            return None
        move = min(due, key=lambda move: (self._overloaded_since[move.source], move.source))
        self._last_move_at = self._moved_at[move.source] = self._moved_at[move.target] = now
        return move

    def _is_due(self, source: WorkerKey, target: WorkerKey, now: float) -> bool:
        waited = now - self._overloaded_since[source] >= self.limits.patience_s
        return waited and source not in self._moved_at and target not in self._moved_at

    def _move(self, worker: WorkerSnapshot, emptiest: list[WorkerSnapshot], tpots: Mapping[WorkerKey, WorkerTpot]) -> Move | None:
        target = next((other for other in emptiest if other.key != worker.key), None)
        if target is None or worker.num_seqs < 2:  # a lone sequence would be no better off elsewhere
            return None
        used, free = load_share(worker), load_share(target)
        if used - free >= self.limits.gap and used >= self.limits.full:
            return Move(worker.key, target.key, f"{worker.worker_id} is {used:.0%} full, {target.worker_id} {free:.0%}")
        return self._slow(worker, target, tpots) if used > free else None

    def _slow(self, worker: WorkerSnapshot, target: WorkerSnapshot, tpots: Mapping[WorkerKey, WorkerTpot]) -> Move | None:
        own, other = tpots.get(worker.key), tpots.get(target.key)
        if own is None or own.objective_s is None or own.tpot_s <= own.objective_s:
            return None
        is_idle = target.num_seqs + target.dispatched_seqs == 0
        if not is_idle and (other is None or other.tpot_s > self.limits.tpot_gap * own.tpot_s):
            return None
        slow = f"{own.tpot_s * 1000:.0f} ms per token, the objective is {own.objective_s * 1000:.0f}"
        return Move(worker.key, target.key, f"{worker.worker_id} gives {slow}; {target.worker_id} is faster")


def _emptiest_by_kind(workers: Iterable[WorkerSnapshot]) -> dict[tuple[object, ...], list[WorkerSnapshot]]:
    """Return the two least loaded workers of each kind and revision: one of them is not the one that wants to move a sequence."""
    kinds: dict[tuple[object, ...], list[WorkerSnapshot]] = {}
    for worker in workers:
        kinds.setdefault(_group(worker), []).append(worker)
    return {kind: heapq.nsmallest(2, those, key=lambda each: (load_share(each), each.address)) for kind, those in kinds.items()}


def _group(worker: WorkerSnapshot) -> tuple[object, ...]:
    return (worker.kind, worker.revision)


def load_share(worker: WorkerSnapshot) -> float:
    """Return how full the worker is, in blocks or sequence slots, with what was sent to it since its heartbeat."""
    blocks = 1 - (worker.num_free_blocks - worker.dispatched_blocks) / worker.num_total_blocks
    slots = (worker.num_seqs + worker.dispatched_seqs) / worker.max_num_seqs
    return max(blocks, slots)


PERIOD_S = 0.1
BALANCE_PERIOD_S = 0.5
MAX_AT_ONCE = 8
"""Requests that may be leaving one draining worker at the same time."""
AGAIN_AFTER_S = 1.0
"""A request that found no other worker is asked again after this time."""
MIN_TOKENS_LEFT = 32
"""Only a request with more tokens left than this moves for balance: another one frees its slot soon."""

logger = logging.getLogger(__name__)


class Migratable(Protocol):
    """Expose a request on a decode worker to migration."""

    @property
    def decode_worker(self) -> WorkerKey | None:
        """Return the decode worker that the request could leave now; None while it cannot, or while a move is under way."""

    @property
    def model(self) -> str:
        """Return the name of the request's model."""

    @property
    def num_tokens(self) -> int:
        """Return the tokens that it has so far."""

    @property
    def num_left(self) -> int:
        """Return the tokens that may still come."""

    def ask_to_move(self, reason: str) -> None:
        """Move elsewhere, if there is room; call it only while `decode_worker` is not None."""


@dataclass(eq=False)
class _Asked:
    """Record from which worker, and when, a request was asked to move."""

    source: WorkerKey
    at: float


class Migrator:
    """Check which requests should move, a few times a second, from `start` to `stop`.

    `requests` are those of this router; the caller adds and removes them.
    """

    def __init__(
        self,
        fleet: FleetRegistry,
        requests: Iterable[Migratable],
        *,
        rebalancer: Rebalancer | None,
        tpot_objectives_s: Mapping[str, float],
    ) -> None:
        """Create it. Without a `rebalancer` requests only leave workers that drain. `tpot_objectives_s`: by model."""
        self._fleet = fleet
        self._requests = requests
        self.rebalancer = rebalancer
        self._objectives = tpot_objectives_s
        self._asked: weakref.WeakKeyDictionary[Migratable, _Asked] = weakref.WeakKeyDictionary()
        self._counted: weakref.WeakKeyDictionary[Migratable, tuple[float, int]] = weakref.WeakKeyDictionary()
        self._balanced_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to check."""
        self._task = asyncio.create_task(self._run(), name="move requests")

    async def stop(self) -> None:
        """Stop; no more requests are asked to move."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self, now: float) -> None:
        """Check once. `now` is monotonic seconds."""
        leaving = {_key(worker) for worker in self._fleet.workers.values() if is_leaving(worker)}
        if leaving:
            self._leave(leaving, now)
        if self.rebalancer is not None and now - self._balanced_at >= BALANCE_PERIOD_S:
            self._balanced_at = now
            self._balance(self.rebalancer, now)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.check(loop.time())
            except Exception:  # requests go on where they are; a bug here must not end the moves of all others
                logger.exception("looking for requests to move failed")
            await asyncio.sleep(PERIOD_S)

    def _leave(self, leaving: set[WorkerKey], now: float) -> None:
        on_their_way: dict[WorkerKey, int] = defaultdict(int)
        here: list[tuple[Migratable, WorkerKey]] = []
        for request in self._requests:
            source, asked = request.decode_worker, self._asked.get(request)
            if source is None and asked is not None:
                on_their_way[asked.source] += 1
            elif source in leaving and (asked is None or now - asked.at >= AGAIN_AFTER_S):
                here.append((request, source))
        for request, source in here:
            if on_their_way[source] < MAX_AT_ONCE:
                on_their_way[source] += 1
                self._ask(request, source, "its worker is about to leave", now)

    def _balance(self, rebalancer: Rebalancer, now: float) -> None:
        move = rebalancer.decide(self._fleet.views(), self._tpots(now), now)
        if move is None:
            return
        there = [request for request in self._requests if request.decode_worker == move.source]
        ready = [request for request in there if request.num_left > MIN_TOKENS_LEFT]
        if ready:
            self._ask(max(ready, key=lambda request: request.num_left), move.source, move.reason, now)

    def _ask(self, request: Migratable, source: WorkerKey, reason: str, now: float) -> None:
        self._asked[request] = _Asked(source, now)
        request.ask_to_move(reason)

    def _tpots(self, now: float) -> dict[WorkerKey, WorkerTpot]:
        """Return the mean TPOT over the last second or so, for each worker that has requests with an objective."""
        if not self._objectives:
            return {}
        times: dict[WorkerKey, list[float]] = defaultdict(list)
        goals: dict[WorkerKey, float] = {}
        for request in self._requests:
            worker, goal = request.decode_worker, self._objectives.get(request.model)
            if worker is not None and goal is not None:
                goals[worker] = min(goal, goals.get(worker, goal))
                tpot_s = self._tpot_s(request, now)
                if tpot_s is not None:
                    times[worker].append(tpot_s)
        return {worker: WorkerTpot(sum(values) / len(values), goals[worker]) for worker, values in times.items()}

    def _tpot_s(self, request: Migratable, now: float) -> float | None:
        """Return the TPOT since the last count, up to a second ago; None when no token has come since."""
        num_tokens = request.num_tokens
        at, before = self._counted.setdefault(request, (now, num_tokens))
        if num_tokens <= before:
            return None
        tpot_s = (now - at) / (num_tokens - before)
        if now - at >= 1.0:
            self._counted[request] = (now, num_tokens)
        return tpot_s


def is_leaving(worker: Worker) -> bool:
    """Return whether the worker is alive, and about to stop, or to stop decoding."""
    current = worker.current
    if current is None:
        return False
    falls_asleep = current.load.serving_state == worker_pb2.SERVING_STATE_ASLEEP
    return current.load.draining or falls_asleep or worker_pb2.ROLE_DECODE not in current.load.roles


def _key(worker: Worker) -> WorkerKey:
    assert worker.current is not None, "only a live worker leaves"
    return (worker.address, worker.current.info.epoch)
