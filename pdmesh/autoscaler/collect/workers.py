"""Derives the live workers, the pools and the replicas that are starting from all routers' reports. Pure."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import TypeAlias

from pdmesh.autoscaler.platform import Asked
from pdmesh.autoscaler.policy.sizing import middle, typical_speed
from pdmesh.autoscaler.views import PoolName, PoolView
from pdmesh.planning.capacity_load import Limits
from pdmesh.planning.latency_message import reported_drafts, reported_latency
from pdmesh.planning.latency_model import NO_DRAFTS, Drafts, LatencyModel
from pdmesh.v1 import mesh_pb2, worker_pb2

WorkerKey: TypeAlias = tuple[str, int]
"""Address and epoch."""

_POOL_OF_ROLES = {
    frozenset({worker_pb2.ROLE_PREFILL}): PoolName.PREFILL,
    frozenset({worker_pb2.ROLE_DECODE}): PoolName.DECODE,
    frozenset({worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE}): PoolName.BOTH,
}


@dataclass(frozen=True)
class SeenWorker:
    """Describe one live worker. `pool` follows its roles now, `home` the roles that it was started with. `num_busy` counts its
    sequences in any state. `reported_s`: when its figures were true, on the loop's clock. `latency` and `limits` are None where
    it does not report them. `keeps_pace`: see `Worker` of pdmesh/planning/capacity_load.py. `drafts`: its speculation
    lately; None: it has decoded nothing yet."""

    worker_id: str
    address: str
    epoch: int
    pool: PoolName
    home: PoolName
    draining: bool
    num_busy: int
    used_blocks: int
    total_blocks: int
    reported_s: float
    latency: LatencyModel | None
    limits: Limits | None
    keeps_pace: bool = True
    is_stopped: bool = False  # paused or asleep
    drafts: Drafts | None = None

    @property
    def key(self) -> WorkerKey:
        """Return what identifies its process."""
        return (self.address, self.epoch)

    @property
    def is_lent(self) -> bool:
        """Return whether it works for another pool than its own."""
        return self.pool is not self.home

    @property
    def serves(self) -> bool:
        """Return whether it accepts new work."""
        return not self.draining


def workers_of(answers: Iterable[tuple[float, mesh_pb2.GetStatusResponse]], model: str) -> list[SeenWorker]:
    """Return the workers of `model` that any router hears, each from its freshest report. `answers` come with their times."""
    found: dict[WorkerKey, SeenWorker] = {}
    for heard_s, answer in answers:
        for told in answer.workers:
            worker = _seen(told, heard_s) if told.alive and told.info.identity.model == model else None
            if worker is not None and (worker.key not in found or worker.reported_s > found[worker.key].reported_s):
                found[worker.key] = worker
    return sorted(found.values(), key=lambda worker: worker.key)


def typical(workers: Collection[SeenWorker]) -> tuple[LatencyModel | None, Limits | None]:
    """Return speed and limits of the median worker; measured models take precedence over estimated ones."""
    told = [worker.latency for worker in workers if worker.latency is not None]
    limits = [worker.limits for worker in workers if worker.limits is not None]
    return typical_speed(told), middle(limits, lambda limit: limit.kv_tokens)


def typical_drafts(workers: Collection[SeenWorker]) -> Drafts:
    """Return the mean speculation of those workers that have decoded."""
    told = [worker.drafts for worker in workers if worker.drafts is not None]
    if not told:
        return NO_DRAFTS
    sums = [sum([each.tokens_per_row for each in told]), sum([each.computed_per_row for each in told])]
    return Drafts(sums[0] / len(told), sums[1] / len(told))


def kv_occupancy(workers: Collection[SeenWorker]) -> float:
    """Return the occupancy of all workers' KV together; 0 without workers."""
    blocks = sum(worker.total_blocks for worker in workers)
    return sum(worker.used_blocks for worker in workers) / blocks if blocks else 0.0


def _seen(told: mesh_pb2.WorkerStatus, heard_s: float) -> SeenWorker | None:
    """Return the worker; None if its roles are invalid, and for a stock engine, which is started and stopped elsewhere."""
    info, load = told.info, told.load
    if not info.identity.weights_hash:
        return None
    pool = _POOL_OF_ROLES.get(frozenset(load.roles or info.roles))
    home = _POOL_OF_ROLES.get(frozenset(info.home_roles)) if info.home_roles else pool
    if pool is None or home is None:
        return None
    return SeenWorker(
        worker_id=info.worker_id,
        address=info.address,
        epoch=info.epoch,
        pool=pool,
        home=home,
        draining=load.draining,
        num_busy=load.num_running + load.num_waiting + load.num_reserved + load.num_held,
        used_blocks=max(0, load.num_total_blocks - load.num_free_blocks),
        total_blocks=load.num_total_blocks,
        reported_s=heard_s - told.report_age_ms / 1000,
        latency=_latency(load),
        limits=_limits(info),
        keeps_pace=worker_pb2.ENGINE_LACK_PACES not in info.lacks,
        is_stopped=load.serving_state in (worker_pb2.SERVING_STATE_PAUSED, worker_pb2.SERVING_STATE_ASLEEP),
        drafts=reported_drafts(load) if load.speculation.num_rows or not load.HasField("speculation") else None,
    )


def _latency(load: worker_pb2.LoadReport) -> LatencyModel | None:
    told = reported_latency(load)
    return told if told is not None and all(math.isfinite(price_s) and price_s >= 0 for price_s in astuple(told)[:5]) else None


def _limits(info: worker_pb2.WorkerInfo) -> Limits | None:
    kv_tokens = info.num_blocks * info.layout.block_size
    if not (info.max_num_batched_tokens and info.max_num_seqs and kv_tokens):
        return None
    return Limits(info.max_num_batched_tokens, info.max_num_seqs, kv_tokens)


# Replicas that were asked for and do not serve yet, whatever has delayed their creation.
#
# A new worker satisfies the oldest pending start. A start that has been pending too long has failed: `pool_plan.py` no longer
# counts it and asks for a replacement. When the replacement fails too, asking for more does not help, and the pool does not grow
# until a worker appears.
#
# A pool may shrink and grow again before a failed start is recognized. A start that was withdrawn and is asked for again soon
# therefore keeps its age: withdrawing it has not produced a worker.


@dataclass(eq=False)
class _Start:
    """Hold a pending start. `since_s` is now minus the time it has been pending; `is_second`: it replaces others that failed."""

    since_s: float
    is_second: bool
    withdrawn_s: float = 0.0


class Starts:
    """Track the pending starts of one pool."""

    def __init__(self, patience_s: float) -> None:
        """Create the tracker. A start fails after `patience_s` seconds."""
        self.patience_s = patience_s
        self._awaited: deque[_Start] = deque()  # oldest first
        self._withdrawn: list[_Start] = []  # oldest last: it is the first to be pending again
        self._num_asked = self._num_serving = 0
        self._is_hopeless = False

    def update(self, now_s: float, num_asked: int, num_serving: int) -> None:
        """Update with the number of replicas asked for, `num_asked`, of which `num_serving` serve."""
        missing = max(0, num_asked - num_serving)
        if num_serving > self._num_serving:
            self._somebody_came()
        self._withdraw(now_s, min(self._num_asked - num_asked, len(self._awaited)))
        self._num_asked, self._num_serving = num_asked, num_serving
        while len(self._awaited) > missing:
            self._awaited.popleft()
        for _ in range(missing - len(self._awaited)):
            self._awaited.append(self._next(now_s))
        self._judge(now_s)

    @property
    def is_hopeless(self) -> bool:
        """Return whether a replacement of a failed start has failed too, and no worker has appeared since: asking for more does
        not help."""
        return self._is_hopeless

    @property
    def num_serving(self) -> int:
        """Return the number of replicas that serve."""
        return self._num_serving

    def ages_s(self, now_s: float) -> tuple[float, ...]:
        """Return the ages of all pending starts, oldest first."""
        return tuple(max(0.0, now_s - start.since_s) for start in self._awaited)

    def num_failed(self, now_s: float) -> int:
        """Return the number of starts that have been pending too long."""
        return sum(age_s > self.patience_s for age_s in self.ages_s(now_s))

    def is_failing(self, now_s: float) -> bool:
        """Return whether a start has failed, pending or withdrawn a moment ago, and no worker has appeared in its place."""
        withdrawn = any(start.withdrawn_s - start.since_s > self.patience_s for start in self._withdrawn)
        return withdrawn or self.num_failed(now_s) > 0

    def _somebody_came(self) -> None:
        """Reset the failures: a worker has appeared, so the pending starts may succeed too."""
        self._is_hopeless = False
        self._withdrawn.clear()
        for start in self._awaited:
            start.is_second = False

    def _withdraw(self, now_s: float, num: int) -> None:
        """Withdraw the latest `num` pending starts."""
        self._withdrawn = [start for start in self._withdrawn if now_s - start.withdrawn_s <= self.patience_s]
        for _ in range(num):
            start = self._awaited.pop()
            start.withdrawn_s = now_s
            self._withdrawn.append(start)

    def _next(self, now_s: float) -> _Start:
        if not self._withdrawn:
            return _Start(now_s, is_second=self.num_failed(now_s) > 0)
        start = self._withdrawn.pop()
        start.since_s += now_s - start.withdrawn_s
        return start

    def _judge(self, now_s: float) -> None:
        if any(start.is_second and now_s - start.since_s > self.patience_s for start in self._awaited):
            self._is_hopeless = True
        elif not self._awaited and not self._withdrawn:
            self._is_hopeless = False


# The pools that the policy decides on, from live workers and the replicas asked for.


@dataclass(frozen=True)
class Pools:
    """Hold the pools of one model's mesh: the replicas `asked` of the platform and the live `workers`."""

    asked: Mapping[PoolName, Asked]
    workers: tuple[SeenWorker, ...]

    def pool_of(self, worker: SeenWorker) -> PoolName:
        """Return the pool that the worker counts for: by its roles now, or by its original roles if no pool has the current
        ones."""
        return worker.pool if worker.pool in self.asked else worker.home

    def here(self, name: PoolName) -> list[SeenWorker]:
        """Return the workers that serve with the pool's roles."""
        return [worker for worker in self.workers if worker.serves and self.pool_of(worker) is name]

    def own(self, name: PoolName) -> list[SeenWorker]:
        """Return the pool's own workers that serve, whatever roles they have now."""
        return [worker for worker in self.workers if worker.serves and worker.home is name]

    def num_leaving(self, name: PoolName) -> int:
        """Return how many of its own are no longer asked for but have not been told to drain yet."""
        return max(0, len(self.own(name)) - self.asked[name].replicas)

    def num_lent(self, name: PoolName) -> int:
        """Return how many of its own work for another pool."""
        return sum(self.pool_of(worker) is not name for worker in self.own(name))

    def num_borrowed(self, name: PoolName) -> int:
        """Return how many workers of other pools work for it."""
        return sum(worker.home is not name for worker in self.here(name))

    def num_own(self, name: PoolName, replicas: int) -> int:
        """Return how many of its own the platform must run so that `replicas` work for it."""
        return max(0, replicas + self.num_lent(name) - self.num_borrowed(name))

    def moved(self, worker: SeenWorker, pool: PoolName) -> "Pools":
        """Return the same pools with other roles for one worker."""
        changed = replace(worker, pool=pool)
        return replace(self, workers=tuple(changed if each.key == worker.key else each for each in self.workers))

    def views(self, starts: Mapping[PoolName, Starts], now_s: float, heard_s: float) -> tuple[PoolView, ...]:
        """Return the policy's views; `starts` are already updated with these pools. `heard_s`: when a router last answered."""
        return tuple(self._view(name, starts[name], now_s, heard_s) for name in self.asked)

    def _view(self, name: PoolName, starts: Starts, now_s: float, heard_s: float) -> PoolView:
        here, leaving = self.here(name), self.num_leaving(name)
        latency, limits = typical(here)
        draining = sum(not worker.serves and worker.home is name for worker in self.workers)
        reported_s = min([heard_s, *(worker.reported_s for worker in here)])
        return PoolView(
            name=name,
            num_ready=max(0, len(here) - leaving),
            starting_ages_s=starts.ages_s(now_s),
            num_draining=draining + leaving,
            latency=latency,
            limits=limits,
            kv_occupancy=kv_occupancy(here),
            num_borrowed=self.num_borrowed(name),
            age_s=max(0.0, now_s - reported_s),
            hold=self.asked[name].hold,
            keeps_pace=all(worker.keeps_pace for worker in here),
            num_stopped=sum(worker.is_stopped for worker in here),
            drafts=typical_drafts(here),
        )

    def follow(self, starts: Mapping[PoolName, Starts], now_s: float) -> None:
        """Update `starts` with the workers that serve."""
        for name, asked in self.asked.items():
            starts[name].update(now_s, asked.replicas, len(self.own(name)) - self.num_leaving(name))


def idlest(workers: Collection[SeenWorker], taker: PoolName, num: int) -> list[SeenWorker]:
    """Return the idlest workers that may switch roles: those lent by the taker first, then those with the least work."""
    return sorted(workers, key=lambda worker: (worker.home is not taker, worker.num_busy, worker.used_blocks, worker.key))[:num]
