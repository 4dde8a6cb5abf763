"""Switches the roles of running workers: their work in the old role finishes or moves elsewhere.

flip ──► the idlest workers of the giver ──► SetRoles on each ──► they take work of the other kind at once
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from pdmesh.autoscaler.collect.workers import Pools, idlest
from pdmesh.autoscaler.views import PoolName
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from pdmesh.autoscaler.collect.workers import SeenWorker
    from pdmesh.autoscaler.views import Flip
    from pdmesh.runtime.rpc.mesh_secret import MeshSecret
    from pdmesh.runtime.rpc.tls import Tls

ROLES: Mapping[PoolName, tuple[worker_pb2.Role.ValueType, ...]] = {
    PoolName.PREFILL: (worker_pb2.ROLE_PREFILL,),
    PoolName.DECODE: (worker_pb2.ROLE_DECODE,),
    PoolName.BOTH: (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE),
}
CALL_TIMEOUT_S = 2.0
"""Seconds that a round waits for a change; a worker that drains for longer has its new roles all the same."""

logger = logging.getLogger(__name__)


class FlipFailed(Exception):
    """Raised when a worker did not switch roles. Says which, and why."""


@dataclass(frozen=True)
class Flipped:
    """Hold the outcome: the `pools` afterwards, the workers that switched, and why others did not."""

    pools: Pools
    workers: tuple[str, ...]
    problem: str | None = None


class Roles(Protocol):
    """Switch the roles of workers."""

    async def flip(self, flip: Flip, pools: Pools) -> Flipped:
        """Switch roles. Raises nothing."""
        ...

    async def close(self) -> None:
        """Close it. Idempotent."""
        ...


class RoleChanger:
    """Switch roles by SetRoles, on one event loop. Close it after use: drains that are under way continue without it."""

    def __init__(self, *, drain_timeout_s: float, tls: Tls | None = None, secret: MeshSecret | None = None) -> None:
        """Create it. `drain_timeout_s`: after which a worker gives up its work in a lost role; routers continue it elsewhere."""
        self._drain_timeout_s, self._tls, self._secret = drain_timeout_s, tls, secret
        self._draining: set[asyncio.Task[None]] = set()

    async def flip(self, flip: Flip, pools: Pools) -> Flipped:
        """Switch the idlest first. Raises nothing: the result holds what went wrong."""
        chosen, changed = idlest(pools.here(flip.giver), flip.taker, flip.num), []
        try:
            for worker in chosen:
                await self._change(worker, flip.taker)
                pools = pools.moved(worker, flip.taker)
                changed.append(worker.worker_id)
        except FlipFailed as error:
            return Flipped(pools, tuple(changed), str(error))
        few = f"only {len(chosen)} of {flip.num} workers of {flip.giver} are there to become {flip.taker}"
        return Flipped(pools, tuple(changed), few if len(chosen) < flip.num else None)

    async def close(self) -> None:
        """Close it without waiting."""
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)

    async def _change(self, worker: SeenWorker, pool: PoolName) -> None:
        """Switch one worker. Returns when its old work is done, or after CALL_TIMEOUT_S: the roles are in force at once."""
        task = asyncio.create_task(self._call(worker, pool), name=f"roles of {worker.worker_id}")
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)
        await asyncio.wait([task], timeout=CALL_TIMEOUT_S)
        if task.done():
            task.result()
        else:
            logger.info("%s becomes %s and still finishes what it has", worker.worker_id, pool)
            task.add_done_callback(_report)

    async def _call(self, worker: SeenWorker, pool: PoolName) -> None:
        request = worker_pb2.SetRolesRequest(roles=ROLES[pool], drain_timeout_ms=max(1, round(self._drain_timeout_s * 1000)))
        channel = connect(worker.address, tls=self._tls, secret=self._secret)
        try:
            control: worker_pb2_grpc.WorkerControlAsyncStub = worker_pb2_grpc.WorkerControlStub(channel)
            info = await control.GetInfo(worker_pb2.GetInfoRequest(), timeout=CALL_TIMEOUT_S / 2)
            if info.epoch != worker.epoch:
                raise FlipFailed(f"{worker.worker_id} has just restarted")
            await control.SetRoles(request, timeout=self._drain_timeout_s + CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            problem = f"{error.code().name}, {error.details() or 'without a reason'}"
            raise FlipFailed(f"{worker.worker_id} at {worker.address} did not become {pool}: {problem}") from error
        finally:
            await channel.close()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("%s", error)
