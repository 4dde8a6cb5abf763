"""Starts and drains workers of a local mesh for the autoscaler.

scale(3) ─► start a process ─► it registers ─► routers find it
                └► fails: one less is asked for, and the next attempt is delayed
scale(2) ─► SIGTERM to the least useful one ─► it finishes or migrates its work ─► it is gone
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.platform import Asked, PlatformError
from pdmesh.autoscaler.views import PoolDecision, PoolName
from pdmesh.client.client import AsyncClient
from pdmesh.errors import MeshError
from pdmesh.launcher.member import Member, backoff_s
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.runtime.child import StartFailed
from pdmesh.v1 import mesh_pb2

PREFIXES: Mapping[PoolName, str] = {PoolName.PREFILL: "prefill", PoolName.DECODE: "decode", PoolName.BOTH: "worker"}
STATUS_TIMEOUT_S = 1.0


@dataclass(eq=False)
class _Pool:
    """Hold the state of a pool: `asked` for, of which `starting` are not ready; `num_failures` in a row, after which nothing
    starts before `next_try`."""

    asked: int
    starting: dict[asyncio.Task[None], None] = field(default_factory=dict)  # the youngest is last
    leaving: set[str] = field(default_factory=set)
    num_failures: int = 0
    next_try: float = 0.0
    problem: str = ""


class LocalPlatform:
    """Implement `pdmesh.autoscaler.platform.Platform` for one running mesh. On its event loop; close it before the mesh stops.

    The mesh restarts a worker that dies; one that cannot be restarted is no longer counted."""

    def __init__(
        self, mesh: LocalMesh, on_event: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create it. `on_event` receives failed starts; the mesh reports successful ones."""
        self._mesh, self._on_event, self._clock = mesh, on_event, clock
        config = mesh.config
        counts = {PoolName.PREFILL: config.num_prefill, PoolName.DECODE: config.num_decode, PoolName.BOTH: config.num_both}
        names = (PoolName.BOTH,) if config.num_both else (PoolName.PREFILL, PoolName.DECODE)
        self._pools = {name: _Pool(counts[name]) for name in names}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def is_settled(self) -> bool:
        """Return whether no worker is starting or leaving."""
        return not self._ending and not any(pool.starting for pool in self._pools.values())

    async def leads(self, now_s: float) -> bool:
        """Return True: there is no other candidate."""
        return True

    async def observe(self, now_s: float) -> Mapping[PoolName, Asked]:
        """Return what was asked for; failed starts are no longer asked for."""
        for name, pool in self._pools.items():
            await self._bury(name, pool)
        return {name: Asked(pool.asked) for name, pool in self._pools.items()}

    async def scale(self, decision: PoolDecision, replicas: int, now_s: float) -> None:
        """Return at once: workers start and drain in the background. Raises PlatformError while a failed start is recent."""
        pool = self._pools[decision.name]
        if replicas > pool.asked:
            self._check_patience(decision.name, pool)
            for _ in range(replicas - pool.asked):
                self._start(decision.name, pool)
        elif replicas < pool.asked:
            await self._shrink(decision.name, pool, pool.asked - replicas)

    async def starts_failed(self, name: PoolName, problem: str) -> None:
        """Ignore it: a failed start is reported at once; this one is only slow."""
        self._on_event(f"{name}: {problem}")

    async def load(self) -> State | None:
        """Return None: there was no former leader."""
        return None

    async def save(self, state: State) -> None:
        """Save nothing: there is no next leader."""

    async def close(self) -> None:
        """Cancel starts, wait for drains."""
        self._closed = True
        tasks = [task for pool in self._pools.values() for task in pool.starting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)

    def _check_patience(self, name: PoolName, pool: _Pool) -> None:
        left_s = pool.next_try - self._clock()
        if self._closed or left_s > 0:
            raise PlatformError(f"{name} does not grow: {pool.problem}; the next try is {left_s:.0f} s away")

    def _start(self, name: PoolName, pool: _Pool) -> None:
        pool.asked += 1
        task = asyncio.create_task(self._started(name, pool), name=f"start one of {name}")
        pool.starting[task] = None
        task.add_done_callback(lambda done: pool.starting.pop(done, None))

    async def _started(self, name: PoolName, pool: _Pool) -> None:
        try:
            await self._mesh.add_worker(PREFIXES[name])
        except asyncio.CancelledError:
            raise  # cancelled by its caller, which no longer asks for it
        except (StartFailed, OSError) as error:
            pool.asked -= 1
            self._failed(pool, str(error))
        else:
            pool.num_failures = 0

    def _failed(self, pool: _Pool, problem: str) -> None:
        """Note a failure; several workers that were started together fail together: that is one failure."""
        if self._clock() >= pool.next_try:
            pool.num_failures += 1
        pool.problem = problem.partition(";")[0]
        pool.next_try = self._clock() + 2 * backoff_s(pool.num_failures)
        self._on_event(problem)

    async def _shrink(self, name: PoolName, pool: _Pool, num: int) -> None:
        """Remove starting workers first, youngest first; then those with the least work."""
        for task in list(pool.starting)[::-1][:num]:
            task.cancel()
            pool.asked -= 1
            num -= 1
        for member in (await self._by_worth(name, pool))[:num]:
            pool.asked -= 1
            pool.leaving.add(member.name)
            self._in_background(self._removed(member, pool))

    async def _removed(self, member: Member, pool: _Pool) -> None:
        try:
            await self._mesh.remove_worker(member.name)
        finally:
            pool.leaving.discard(member.name)

    async def _bury(self, name: PoolName, pool: _Pool) -> None:
        for member in self._own(name, pool):
            if member.given_up:
                pool.asked -= 1
                self._failed(pool, f"{member.name} has died and could not be started again; its log: {member.log_path}")
                await self._mesh.remove_worker(member.name)

    def _own(self, name: PoolName, pool: _Pool) -> list[Member]:
        """Return its workers that are ready and stay."""
        ready = (member for member in self._mesh.workers if member.name.rpartition("-")[0] == PREFIXES[name])
        return [member for member in ready if member.start_s and member.name not in pool.leaving]

    async def _by_worth(self, name: PoolName, pool: _Pool) -> list[Member]:
        """Sort by usefulness, least first: workers of their own pool with little work; without figures the youngest."""
        youngest = self._own(name, pool)[::-1]
        try:
            async with AsyncClient(self._mesh.router_addresses, tls=self._mesh.tls) as client:
                status = await client.status(timeout=STATUS_TIMEOUT_S)
        except (MeshError, RuntimeError):
            return youngest
        worth = {told.info.worker_id: _worth(told) for told in status.workers if told.alive}
        return sorted(youngest, key=lambda member: worth.get(member.name, (False, 0, 0)))

    def _in_background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _worth(told: mesh_pb2.WorkerStatus) -> tuple[bool, int, int]:
    """Return (lent to another pool, sequences, blocks)."""
    load = told.load
    busy = load.num_running + load.num_waiting + load.num_reserved + load.num_held
    return set(load.roles) != set(told.info.home_roles), busy, load.num_total_blocks - load.num_free_blocks
