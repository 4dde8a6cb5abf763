"""The release of sessions: workers give up what they retain, and requests of the session that are open retain nothing any more.

A client's release waits for the answers of the workers; that of a session whose last request has ended runs in the background.
A worker that is lost, or slow, is counted and never waited for: what it retains ends with its time. One of an earlier version
retains nothing, nor does one that has said that it ends, or that the registry has no more.

One release asks every worker, so only a few run at a time, and few wait: a client cannot make much out of little.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Protocol

import grpc
import grpc.aio

from pdmesh.runtime.errors import ResourceExhausted
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.fleet.heartbeat import being_cancelled
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.routing.decisions import SessionMemory
from router.tokenization.prepared_request import SessionState

RELEASE_TIMEOUT_S = 2.0
MAX_AT_ONCE = 8
"""Releases that ask workers at a time: so many for clients, and as many for sessions whose last request has ended."""
MAX_WAITING, MAX_WAITING_OF_TENANT = 64, 16
MAX_ENDED = 1024
"""Releases of ended sessions that wait; those beyond are left to the time of what is retained."""
RETRY_DELAY_S = 1.0

logger = logging.getLogger(__name__)


class Spawner(Protocol):
    """Run work in the background, which a router that ends waits for."""

    def spawn(self, work: Coroutine[object, object, None], name: str) -> object:
        """Run `work` in a task."""


class Turns:
    """Let a few at a time begin, in the order of their arrival, and bound how many wait: in all, and of each tenant."""

    def __init__(self, max_waiting: int, max_waiting_of_tenant: int) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_of_tenant = max_waiting_of_tenant
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._waiting: Counter[str] = Counter()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises ResourceExhausted where too many wait already."""
        if self._places.locked():
            self._check(tenant)
        await self._wait(tenant)
        try:
            yield
        finally:
            self._places.release()

    def _check(self, tenant: str) -> None:
        if self._num_waiting >= self._max_waiting or self._waiting[tenant] >= self._max_waiting_of_tenant:
            raise ResourceExhausted("too many releases of sessions wait on this router; try again", retry_delay_s=RETRY_DELAY_S)

    async def _wait(self, tenant: str) -> None:
        self._num_waiting += 1
        self._waiting[tenant] += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]


class SessionReleases:
    """Release the sessions of one router, whose open requests with a session `enter` and `leave`."""

    def __init__(self, fleet: FleetRegistry, memory: SessionMemory, background: Spawner) -> None:
        self._fleet = fleet
        self._memory = memory
        self._background = background
        self._open: dict[tuple[str, str], set[SessionState]] = {}
        self._asked = Turns(MAX_WAITING, MAX_WAITING_OF_TENANT)
        self._ended = Turns(MAX_ENDED, MAX_ENDED)
        self._waiting: set[tuple[str, str, str]] = set()  # ended sessions whose turn has not come

    def __len__(self) -> int:
        """Return the number of sessions that have open requests."""
        return len(self._open)

    def enter(self, state: SessionState | None) -> None:
        """Have releases of its session reach an open request; `leave` has to follow. None: it has no session."""
        if state is not None:
            self._open.setdefault(state.key, set()).add(state)

    def leave(self, state: SessionState | None) -> None:
        """Forget a request that has ended."""
        states = self._open.get(state.key) if state is not None else None
        if state is None or states is None:
            return
        states.discard(state)
        if not states:
            del self._open[state.key]

    async def release(self, tenant: str, session_id: str, model: str = "") -> mesh_pb2.ReleaseSessionResponse:
        """Return what the workers of `model` have released, empty for all models. Raises ResourceExhausted."""
        async with self._asked.turn(tenant):
            self._let_go(tenant, session_id, model)
            return await self._ask_all(tenant, session_id, model)

    def release_ended(self, tenant: str, session_id: str, model: str) -> None:
        """Release a session whose last request has ended, in the background. One that waits already is released once."""
        self._let_go(tenant, session_id, model)
        if (tenant, session_id, model) not in self._waiting:
            self._waiting.add((tenant, session_id, model))
            self._background.spawn(self._release_ended(tenant, session_id, model), "release an ended session")

    async def _release_ended(self, tenant: str, session_id: str, model: str) -> None:
        try:
            async with self._ended.turn(tenant):
                self._waiting.discard((tenant, session_id, model))
                await self._ask_all(tenant, session_id, model)
        except ResourceExhausted:
            logger.warning("an ended session is not released: %d others wait. What workers retain ends with its time", MAX_ENDED)
        finally:
            self._waiting.discard((tenant, session_id, model))

    def _let_go(self, tenant: str, session_id: str, model: str) -> None:
        """Forget the session, and have its open requests retain nothing, wherever they are sent from now on."""
        self._memory.forget(tenant, session_id, model)
        for state in self._open.get((tenant, session_id), ()):
            state.is_released = state.is_released or model in ("", state.model)

    async def _ask_all(self, tenant: str, session_id: str, model: str) -> mesh_pb2.ReleaseSessionResponse:
        workers = [worker for worker in self._fleet.workers.values() if _may_retain(worker, model)]
        released = await asyncio.gather(*(_ask(worker, tenant, session_id) for worker in workers))
        answered = [num_blocks for num_blocks in released if num_blocks is not None]
        return mesh_pb2.ReleaseSessionResponse(
            num_blocks=sum(answered),
            num_workers=sum(num_blocks > 0 for num_blocks in answered),
            num_unreachable=len(released) - len(answered),
        )


def _may_retain(worker: Worker, model: str) -> bool:
    """Return whether a worker may retain something of `model`: it has answered this router once, and is not known to have ended.
    One that fell silent may be alive."""
    if worker.last is None or model not in ("", worker.last.info.identity.model):
        return False
    if worker_pb2.ENGINE_LACK_RETENTION in worker.last.info.lacks:
        return False
    has_ended = worker.current is None and (worker.last.load.draining or not (worker.static or worker.registered))
    return not has_ended


async def _ask(worker: Worker, tenant: str, session_id: str) -> int | None:
    """Return the number of blocks that a worker has released; None: it did not answer."""
    if worker.current is None:
        return None
    try:
        return await worker.release_retained(tenant, session_id, RELEASE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return 0
        logger.info("%s did not release a session: %s", worker.address, error.details())
    except grpc.aio.UsageError:
        logger.info("%s did not release a session: its channel was closed", worker.address)
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        logger.info("%s did not release a session: its channel was closed meanwhile", worker.address)
    return None
