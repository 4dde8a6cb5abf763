"""Which workers are there, from what all routers tell of them. Pure."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from pdmesh.autoscaler.policy.speed import middle, typical_speed
from pdmesh.autoscaler.views import PoolName
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
