"""Asks the routers how the mesh is, each second while somebody looks, seldom otherwise; every few seconds what was decided."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdmesh.client.channel import open_aio_channel
from pdmesh.console import mesh_view
from pdmesh.errors import error_from_rpc
from pdmesh.launcher import local_state
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import mesh_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshStub

if TYPE_CHECKING:
    from pdmesh.v1.mesh_pb2_grpc import MeshAsyncStub

WATCHED_PERIOD_S, IDLE_PERIOD_S = 1.0, 10.0
DECISIONS_PERIOD_S = 3.0  # of all that is asked they are the most to tell and to read
WATCHED_FOR_S = 10.0
TIMEOUT_S = 2.0
MAX_DECISIONS = 30
MAX_SCALINGS = 50

Metadata = tuple[tuple[str, str], ...]


@dataclass
class _Router:
    """What is known of one."""

    address: str
    stub: MeshAsyncStub
    status: mesh_pb2.GetStatusResponse | None = None
    policy: Sequence[dict[str, Any]] = ()
    explained_at: float = float("-inf")
    problem: str = "has not been asked yet"


class Topology:
    """The latest answers. Belongs to one event loop; `start`, then `stop`."""

    def __init__(
        self, routers: Sequence[str], tls: Tls | None, metadata: Metadata | None, *, on_change: Callable[[], None]
    ) -> None:
        self._channels = [open_aio_channel(address, tls) for address in routers]
        self._routers = [_Router(address, MeshStub(channel)) for address, channel in zip(routers, self._channels, strict=True)]
        self._metadata = metadata
        self._on_change = on_change
        self._watched_at = float("-inf")
        self._wanted = asyncio.Event()
        self._scalings: deque[dict[str, Any]] = deque(maxlen=MAX_SCALINGS)
        self._scaled_at_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to ask."""
        self._task = asyncio.create_task(self._run(), name="topology")

    async def stop(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def watch(self) -> None:
        """Somebody looks now."""
        is_news = not self._is_watched
        self._watched_at = time.monotonic()
        if is_news:
            self._wanted.set()

    def view(self) -> dict[str, Any]:
        """Routers, workers, objectives and decisions, for the page."""
        statuses = [router.status for router in self._routers if router.status is not None]
        policy = (decision for router in self._routers for decision in router.policy)
        return {
            "routers": [mesh_view.router_view(each.address, each.status, each.problem) for each in self._routers],
            "workers": mesh_view.worker_views(statuses),
            "objectives": mesh_view.objective_views(statuses),
            "policy": heapq.nlargest(MAX_DECISIONS, policy, key=lambda decision: decision["at_s"]),
            "autoscaler": list(reversed(self._scalings)),
        }

    @property
    def _is_watched(self) -> bool:
        return time.monotonic() - self._watched_at < WATCHED_FOR_S

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            await asyncio.gather(*(self._ask(router) for router in self._routers))
            await asyncio.to_thread(self._read_scaling)
            self._on_change()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), WATCHED_PERIOD_S if self._is_watched else IDLE_PERIOD_S)

    async def _ask(self, router: _Router) -> None:
        try:
            router.status = await router.stub.GetStatus(mesh_pb2.GetStatusRequest(), timeout=TIMEOUT_S, metadata=self._metadata)
            router.problem = ""
        except grpc.aio.AioRpcError as error:
            router.problem = error_from_rpc(error).message or error.code().name
            return
        if self._is_watched and time.monotonic() - router.explained_at >= DECISIONS_PERIOD_S:
            router.explained_at = time.monotonic()
            await self._ask_why(router, router.status.router_id)

    async def _ask_why(self, router: _Router, router_id: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # not for everybody: then there are no decisions to be seen
            latest = mesh_pb2.ExplainRequest(latest=MAX_DECISIONS)
            explained = await router.stub.Explain(latest, timeout=TIMEOUT_S, metadata=self._metadata)
            router.policy = mesh_view.policy_views(router_id, explained.decisions, time.time())

    def _read_scaling(self) -> None:
        """What `pdmesh up --autoscale` on this machine has decided since the last look; what changes nothing only once."""
        statuses = [router.status for router in self._routers if router.status is not None]
        alive = [worker.info.address for status in statuses for worker in status.workers if worker.alive]
        decided = local_state.latest(alive)
        if decided is None or decided["at_s"] <= self._scaled_at_s:
            return
        self._scaled_at_s = decided["at_s"]
        for pool in decided["pools"]:
            self._note_scaling({"at_s": decided["at_s"], **pool})

    def _note_scaling(self, pool: dict[str, Any]) -> None:
        former = next((each for each in reversed(self._scalings) if each.get("name") == pool.get("name")), None)
        is_steady = pool.get("before") == pool.get("replicas")
        if former is not None and is_steady and former.get("before") == former.get("replicas"):
            self._scalings.remove(former)
        self._scalings.append(pool)
