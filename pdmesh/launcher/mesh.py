"""Runs a mesh on this machine: Redis, workers and routers as separate processes, started together, watched, and stopped in order.

    async with LocalMesh(LocalMeshConfig(model=str(folder)), on_event=print) as mesh:
        async with AsyncClient(mesh.router_address) as client: ...
        mesh.kill("decode-0", signal.SIGKILL)        # it is reported and started again

However this process ends, the others end with it (`pdmesh.platform.parent_death`); so the event loop must run in a thread that
lives as long as the mesh, as the main thread does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.table import Table

from pdmesh.client.client import AsyncClient
from pdmesh.errors import MeshError
from pdmesh.launcher.core_table import SharedFile
from pdmesh.launcher.local_state import Target
from pdmesh.launcher.member import Member, OnEvent, start_all
from pdmesh.launcher.plan import (
    EMBEDDED_REDIS,
    LocalMeshConfig,
    ProcessPlan,
    console_plan,
    cpu_sets,
    router_plans,
    with_port,
    worker_plan,
    worker_plans,
)
from pdmesh.launcher.sidecars import RedisMember, Traces, require_free, require_redis
from pdmesh.platform.capabilities import AFFINITY
from pdmesh.platform.fallbacks import cores_to_share, usable_cores
from pdmesh.runtime.child import StartFailed
from pdmesh.runtime.rpc.certificates import CertificateError, make_certificates
from pdmesh.runtime.rpc.mesh_secret import MeshSecretConfig, write_secret
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.terminal import table

_POLL_PERIOD_S = 0.05
_REDIS_PATIENCE_S = 5.0


def _ignore(event: str) -> None:
    """Ignore the event."""


class LocalMesh:
    """Own all processes of a local mesh. Use as an async context manager, or call `start` and `stop`.

    `on_event` receives a line for each death, restart and failure; `on_progress` what a slow start is doing."""

    def __init__(self, config: LocalMeshConfig, *, on_event: OnEvent = _ignore, on_progress: OnEvent = _ignore) -> None:
        config.validate()
        self.config = config
        self.log_dir = Path(config.log_dir or tempfile.mkdtemp(prefix="pdmesh-logs-"))
        self.redis_url = config.redis
        self.routers: tuple[Member, ...] = ()
        self.workers: tuple[Member, ...] = ()
        self.console: Member | None = None
        self.started = False  # whether everything is ready, and not stopped
        self._redis: RedisMember | None = None
        self._certificates: tempfile.TemporaryDirectory[str] | None = None
        self._secret: tempfile.TemporaryDirectory[str] | None = None
        self._traces: Traces | None = None
        self._core_table: SharedFile | None = None
        self._on_event = on_event
        self._on_progress = on_progress

    @property
    def router_address(self) -> str:
        """Return the address of the first router."""
        return self.routers[0].address

    @property
    def router_addresses(self) -> tuple[str, ...]:
        """Return the addresses of all routers, for `Client`."""
        return tuple(router.address for router in self.routers)

    @property
    def member_addresses(self) -> tuple[str, ...]:
        """Return the addresses of workers and routers: by these `pdmesh status` knows the mesh, also while it has no worker."""
        return (*self.worker_addresses, *self.router_addresses)

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """Return the addresses of all workers that have been ready, whether they live or not."""
        found = []
        for worker in self.workers:
            with contextlib.suppress(RuntimeError):  # it starts
                found.append(worker.address)
        return tuple(found)

    @property
    def http_urls(self) -> tuple[str, ...]:
        """Return the URLs of OpenAI's API on all routers that serve it, without a path."""
        return tuple(router.http_url for router in self.routers if router.http_url)

    @property
    def metrics_targets(self) -> tuple[Target, ...]:
        """Return where routers and workers serve their metrics now; none without config.metrics_port."""
        kinds = ((self.routers, "router"), (self.workers, "worker"))
        return tuple(Target(member.name, role, member.metrics_urls) for group, role in kinds for member in group)

    @property
    def console_url(self) -> str:
        """Return the URL of the console's page; "" without one."""
        return "" if self.console is None else self.console.http_url

    @property
    def tls(self) -> TlsConfig:
        """Return certificates for `Client`; unset without TLS. Throwaway ones exist between start and stop."""
        return self.config.tls

    @property
    def redis_pid(self) -> int | None:
        """Return the pid of the embedded Redis; None while it is not running, and with one of the user's."""
        return None if self._redis is None else self._redis.pid

    @property
    def pids(self) -> dict[str, int]:
        """Return the process id by name of everything that runs now."""
        pids = {member.name: member.pid for member in self._members if member.running}
        redis_pid = self.redis_pid
        return pids if redis_pid is None else {"redis": redis_pid, **pids}

    def member(self, name: str) -> Member:
        """Return the router or worker of that name. Raises KeyError that lists the names."""
        for member in self._members:
            if member.name == name:
                return member
        raise KeyError(f"no process is called {name!r}; there are: {', '.join(m.name for m in self._members)}")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a router or worker. If it dies of it, it is reported and (config.restart) started again."""
        self.member(name).kill(number)

    async def restart(self, name: str) -> None:
        """End a router or worker in order and start it again; return when it is ready."""
        await self.member(name).restart(self.config.stop_grace_s)

    async def add_worker(self, prefix: str) -> Member:
        """Add a worker, called `prefix` and the first number that is free; "prefill", "decode" or "worker" (both roles). Returns
        when it is ready; routers find it by themselves. Raises StartFailed; nothing is left of it then."""
        names = {member.name for member in self._members}
        name = next(name for number in itertools.count() if (name := f"{prefix}-{number}") not in names)
        member = self._member(worker_plan(self.config, name, self.redis_url, cores_to_share()))
        self.workers = (*self.workers, member)
        try:
            await member.start()
        except BaseException:
            await self._end(member, 0.0)
            raise
        self._on_event(f"{name} is ready after {member.start_s:.1f} s (pid {member.pid}, {member.address})")
        return member

    async def remove_worker(self, name: str) -> None:
        """End a worker for good: it accepts nothing new, finishes its work or migrates it, and is gone when this returns. Raises
        KeyError that lists the names."""
        member, began = self.member(name), time.monotonic()
        await self._end(member, (self.config.drain_grace_s or 0.0) + self.config.stop_grace_s)
        self._on_event(f"{name} has finished what it had and is gone, {time.monotonic() - began:.1f} s after it was told")

    async def _end(self, member: Member, grace_s: float) -> None:
        """End it; a cancelled caller still waits for the end."""
        ending = asyncio.ensure_future(member.stop(grace_s))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise
        finally:
            self.workers = tuple(worker for worker in self.workers if worker is not member)

    async def start(self) -> None:
        """Start everything and wait until the routers see all workers. Raises StartFailed with the end of the failed process's
        output; nothing is left running then."""
        try:
            # A little more than one process has: its own error, with the end of its output, says more.
            async with asyncio.timeout(self.config.start_timeout_s + 5):
                await self._start()
        except TimeoutError:
            await self.stop()
            limit = f"{self.config.start_timeout_s:g} s"
            raise StartFailed(f"the mesh was not ready within {limit}; the logs of its processes are in {self.log_dir}") from None
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        if self.config.redis == EMBEDDED_REDIS:
            self._redis = RedisMember(self._on_event, restart=self.config.restart)
            self.redis_url = await self._redis.start()
        else:
            await require_redis(self.redis_url, min(_REDIS_PATIENCE_S, self.config.start_timeout_s))
        if self.config.throwaway_tls and self._certificates is None:
            await self._make_certificates()
        if self.config.throwaway_secret and self._secret is None:
            self._make_secret()
        if self.config.console_port is not None:
            self._take_traces()
        cores = cores_to_share()
        if self.config.bind_cpus and len(cores) < len(usable_cores()):
            self._on_event(f"workers are not bound to cores: a quota of {len(cores)} says how many cores there are, not which")
            self.config = replace(self.config, bind_cpus=False)
        elif self.config.bind_cpus and not cpu_sets(self.config, cores):
            few = f"{len(cores)} cores are too few for the threads of all of them"
            self._on_event(f"workers are not bound to cores: {AFFINITY.problem or few}")
        if self.config.has_lending and self._core_table is None:
            self._core_table = SharedFile.make("cores", self.log_dir)
            self.config = replace(self.config, core_table=self._core_table.path)
        self.workers = tuple(self._member(plan) for plan in worker_plans(self.config, self.redis_url, cores))
        self.routers = tuple(self._member(plan) for plan in router_plans(self.config, self.redis_url))
        await start_all(self._members, self._on_progress)
        for router in self.routers:
            router.plan = with_port(router.plan, int(router.address.rpartition(":")[2]))
            if self.config.http_port is not None:
                router.plan = with_port(router.plan, int(router.http_url.rpartition(":")[2]), "--http-port")
        if self._traces is not None:
            await self._start_console(self._traces)
        await self.wait_ready(self.config.start_timeout_s)
        self.started = True

    def _take_traces(self) -> None:
        """Reserve the trace port before there is a console: traces that processes send until then arrive later."""
        self.console = None
        require_free(self.config.console_host, self.config.console_port or 0)
        self._traces = Traces.reserve(self.config.env, self.config.otlp_endpoint)
        self.config = replace(self.config, env=self._traces.env)

    async def _start_console(self, traces: Traces) -> None:
        routers, forward = self.router_addresses, traces.forward
        self.console = self._member(console_plan(self.config, traces.address, routers, forward=forward, redis_url=self.redis_url))
        await self.console.start()
        self.console.plan = with_port(self.console.plan, int(self.console.http_url.rpartition(":")[2]))

    async def _make_certificates(self) -> None:
        """Make certificates in a folder that only this user can read."""
        self._certificates = tempfile.TemporaryDirectory(prefix="pdmesh-tls-")
        try:
            made = await asyncio.to_thread(make_certificates, Path(self._certificates.name))
        except CertificateError as error:
            raise StartFailed(str(error)) from None
        self.config = replace(self.config, tls=made)

    def _delete_certificates(self) -> None:
        if self._certificates is not None:
            self._certificates.cleanup()
            self._certificates = None
            self.config = replace(self.config, tls=TlsConfig())

    def _make_secret(self) -> None:
        """Make a mesh secret in a folder that only this user can read."""
        self._secret = tempfile.TemporaryDirectory(prefix="pdmesh-secret-")
        self.config = replace(self.config, mesh_secret=write_secret(Path(self._secret.name) / "mesh-secret"))

    def _delete_secret(self) -> None:
        if self._secret is not None:
            self._secret.cleanup()
            self._secret = None
            self.config = replace(self.config, mesh_secret=MeshSecretConfig())

    def _member(self, plan: ProcessPlan) -> Member:
        adjusted = self.config.adjust(plan) if self.config.adjust is not None else plan
        return Member(
            adjusted, self.log_dir, self._on_event, restart=self.config.restart, start_timeout_s=self.config.start_timeout_s
        )

    @property
    def _members(self) -> tuple[Member, ...]:
        return (*self.workers, *self.routers, *(() if self.console is None else (self.console,)))

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every router sees the present process of every worker alive. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            for router in self.routers:
                while not await self._sees_all_workers(router):  # noqa: ASYNC110  # the event happens in another process
                    await asyncio.sleep(_POLL_PERIOD_S)

    async def _sees_all_workers(self, router: Member) -> bool:
        try:
            expected = {(worker.name, worker.address) for worker in self.workers}
            async with AsyncClient(router.address, tls=self.tls) as client:
                status = await client.status(timeout=1.0)
        except (MeshError, RuntimeError):  # the router does not answer, or it or a worker is restarting
            return False
        return expected <= {(worker.info.worker_id, worker.info.address) for worker in status.workers if worker.alive}

    async def stop(self) -> None:
        """Stop routers, then workers, then Redis; each step gets `stop_grace_s` seconds, then SIGKILL. Idempotent; a cancelled
        caller still waits for the end."""
        stopping = asyncio.ensure_future(self._stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping
            raise

    async def _stop(self) -> None:
        self.started = False
        # The console comes last: it receives what the others send at their end.
        for group in (self.routers, self.workers, () if self.console is None else (self.console,)):
            await asyncio.gather(*(member.stop(self.config.stop_grace_s) for member in group))
        if self._redis is not None:
            await self._redis.stop()
            self._redis = None
        if self._traces is not None:
            self.config = replace(self.config, env=self._traces.release())
            self._traces = None
        self._delete_certificates()
        self._delete_secret()
        if self._core_table is not None:
            self._core_table.close()
            self._core_table = None
            self.config = replace(self.config, core_table="")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


# A running local mesh as text.


def process_table(mesh: LocalMesh) -> Table:
    """Return what runs where."""
    consoles = () if mesh.console is None else (mesh.console,)
    rows = [(m.name, ",".join(m.roles), str(m.pid), m.address) for m in (*mesh.routers, *mesh.workers, *consoles)]
    if mesh.redis_pid is not None:
        rows.append(("redis", "registry", str(mesh.redis_pid), mesh.redis_url.removeprefix("redis://")))
    return table(("PROCESS", "ROLES", "PID", "ADDRESS"), rows)
