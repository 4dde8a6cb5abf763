"""Which workers are there, from what all routers tell of them. Pure."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from pdmesh.autoscaler.platform import Asked
from pdmesh.autoscaler.policy.sizing import middle, typical_speed
from pdmesh.autoscaler.views import PoolName, PoolView
from pdmesh.planning.capacity_load import Limits
from pdmesh.planning.latency_model import LatencyModel
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
    """One that lives. `pool` by the roles that it has now, `home` by those that it was started with. `num_busy`: sequences that
    it has in any state. `reported_s`: when its figures were true, on the loop's clock. `latency` and `limits`: None where it does
    not say."""

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

    @property
    def key(self) -> WorkerKey:
        """What tells its process from others."""
        return (self.address, self.epoch)

    @property
    def is_lent(self) -> bool:
        """Whether another pool than its own has it."""
        return self.pool is not self.home

    @property
    def serves(self) -> bool:
        """It takes new work."""
        return not self.draining


def workers_of(answers: Iterable[tuple[float, mesh_pb2.GetStatusResponse]], model: str) -> list[SeenWorker]:
    """Those of `model` that any router hears, as the freshest report has them. `answers`: with the time of each."""
    found: dict[WorkerKey, SeenWorker] = {}
    for heard_s, answer in answers:
        for told in answer.workers:
            worker = _seen(told, heard_s) if told.alive and told.info.identity.model == model else None
            if worker is not None and (worker.key not in found or worker.reported_s > found[worker.key].reported_s):
                found[worker.key] = worker
    return sorted(found.values(), key=lambda worker: worker.key)


def typical(workers: Collection[SeenWorker]) -> tuple[LatencyModel | None, Limits | None]:
    """Speed and limits of the one in the middle; those that have measured count before those that only guess."""
    told = [worker.latency for worker in workers if worker.latency is not None]
    limits = [worker.limits for worker in workers if worker.limits is not None]
    return typical_speed(told), middle(limits, lambda limit: limit.kv_tokens)


def kv_occupancy(workers: Collection[SeenWorker]) -> float:
    """Of all of them together; 0 without any."""
    blocks = sum(worker.total_blocks for worker in workers)
    return sum(worker.used_blocks for worker in workers) / blocks if blocks else 0.0


def _seen(told: mesh_pb2.WorkerStatus, heard_s: float) -> SeenWorker | None:
    """None for one whose roles make no sense."""
    info, load = told.info, told.load
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
    )


def _latency(load: worker_pb2.LoadReport) -> LatencyModel | None:
    if not load.HasField("latency_model"):
        return None
    told = load.latency_model
    prices_s = (told.fixed_s, told.per_prefill_token_s, told.per_prefill_context_s, told.per_sequence_s, told.per_context_token_s)
    if not all(math.isfinite(price_s) and price_s >= 0 for price_s in prices_s):
        return None
    return LatencyModel(
        fixed_s=told.fixed_s,
        per_prefill_token_s=told.per_prefill_token_s,
        per_prefill_context_s=told.per_prefill_context_s,
        per_sequence_s=told.per_sequence_s,
        per_context_token_s=told.per_context_token_s,
        num_steps=told.num_steps,
        prefill_error=told.prefill_error,
        decode_error=told.decode_error,
    )


def _limits(info: worker_pb2.WorkerInfo) -> Limits | None:
    kv_tokens = info.num_blocks * info.layout.block_size
    if not (info.max_num_batched_tokens and info.max_num_seqs and kv_tokens):
        return None
    return Limits(info.max_num_batched_tokens, info.max_num_seqs, kv_tokens)


# Which replicas are on their way: asked for, and not serving yet, whoever has failed to create them so far. Pure.
#
# Who comes, came for the oldest request. One that has been awaited for too long has failed
# (`pdmesh/autoscaler/policy/pool_plan.py` counts it for nothing, and asks for another); when such another has failed as well,
# asking for more has not helped, and the pool is not to grow until somebody comes.
#
# A pool may shrink and grow again before a failed start is known as one. So a start that was withdrawn and is asked for again
# soon goes on where it was: withdrawing it has made nobody come.


@dataclass(eq=False)
class _Start:
    """`since_s`: now less how long it has been awaited. `is_second`: it was asked for after others had failed."""

    since_s: float
    is_second: bool
    withdrawn_s: float = 0.0


class Starts:
    """Of one pool."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: after which a start has failed."""
        self.patience_s = patience_s
        self._awaited: deque[_Start] = deque()  # the oldest first
        self._withdrawn: list[_Start] = []  # the oldest last: it is the first to be awaited again
        self._num_asked = self._num_serving = 0
        self._is_hopeless = False

    def update(self, now_s: float, num_asked: int, num_serving: int) -> None:
        """`num_serving` of the `num_asked` that were asked for last are there."""
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
        """Whether one has failed that was asked for after another had, and nobody has come since: more will not help."""
        return self._is_hopeless

    @property
    def num_serving(self) -> int:
        """Those that are there."""
        return self._num_serving

    def ages_s(self, now_s: float) -> tuple[float, ...]:
        """For how long those have been awaited that are awaited now, the oldest first."""
        return tuple(max(0.0, now_s - start.since_s) for start in self._awaited)

    def num_failed(self, now_s: float) -> int:
        """Those that have been awaited for too long."""
        return sum(age_s > self.patience_s for age_s in self.ages_s(now_s))

    def is_failing(self, now_s: float) -> bool:
        """Whether one has failed, be it asked for at the moment or withdrawn a moment ago, and nobody has come in its place."""
        withdrawn = any(start.withdrawn_s - start.since_s > self.patience_s for start in self._withdrawn)
        return withdrawn or self.num_failed(now_s) > 0

    def _somebody_came(self) -> None:
        """So those who are awaited still may come as well."""
        self._is_hopeless = False
        self._withdrawn.clear()
        for start in self._awaited:
            start.is_second = False

    def _withdraw(self, now_s: float, num: int) -> None:
        """Whoever is asked for no more is the one that was asked for last."""
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


# From workers that are seen, and replicas that were asked for, to the pools that the policy decides on. Pure.


@dataclass(frozen=True)
class Pools:
    """Of one model's mesh. `asked` of the platform, `workers` that live."""

    asked: Mapping[PoolName, Asked]
    workers: tuple[SeenWorker, ...]

    def pool_of(self, worker: SeenWorker) -> PoolName:
        """Where it counts: by its roles now, or, where no pool has such roles, by those that it was started with."""
        return worker.pool if worker.pool in self.asked else worker.home

    def here(self, name: PoolName) -> list[SeenWorker]:
        """Those that serve with the pool's roles."""
        return [worker for worker in self.workers if worker.serves and self.pool_of(worker) is name]

    def own(self, name: PoolName) -> list[SeenWorker]:
        """Those that serve and were started for it, whatever they do now."""
        return [worker for worker in self.workers if worker.serves and worker.home is name]

    def num_leaving(self, name: PoolName) -> int:
        """Of its own, those that are not asked for any more and have not been told so far."""
        return max(0, len(self.own(name)) - self.asked[name].replicas)

    def num_lent(self, name: PoolName) -> int:
        """Of its own, those that work for another pool."""
        return sum(self.pool_of(worker) is not name for worker in self.own(name))

    def num_borrowed(self, name: PoolName) -> int:
        """Of those that work for it, others' own."""
        return sum(worker.home is not name for worker in self.here(name))

    def num_own(self, name: PoolName, replicas: int) -> int:
        """How many of its own the platform has to be asked for, so that so many work for it."""
        return max(0, replicas + self.num_lent(name) - self.num_borrowed(name))

    def moved(self, worker: SeenWorker, pool: PoolName) -> "Pools":
        """The same, with other roles for one of the workers."""
        changed = replace(worker, pool=pool)
        return replace(self, workers=tuple(changed if each.key == worker.key else each for each in self.workers))

    def views(self, starts: Mapping[PoolName, Starts], now_s: float, heard_s: float) -> tuple[PoolView, ...]:
        """As the policy takes them; `starts` have been told of these pools already. `heard_s`: when a router was heard last."""
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
        )

    def follow(self, starts: Mapping[PoolName, Starts], now_s: float) -> None:
        """Tell `starts` who has come."""
        for name, asked in self.asked.items():
            starts[name].update(now_s, asked.replicas, len(self.own(name)) - self.num_leaving(name))


def idlest(workers: Collection[SeenWorker], taker: PoolName, num: int) -> list[SeenWorker]:
    """Of those that may change sides: those come home first that the taker had lent, then those who have least to do."""
    return sorted(workers, key=lambda worker: (worker.home is not taker, worker.num_busy, worker.used_blocks, worker.key))[:num]
