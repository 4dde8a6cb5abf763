"""A mesh that can be hurt: each worker behind links of ours, workers and routers with clocks of their own, and failpoints that
are armed while they run."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import signal
import struct
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from redis.asyncio import Redis

from pdmesh.client.client import AsyncClient
from pdmesh.errors import MeshError
from pdmesh.launcher.member import Member
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan, engine_python
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.v1 import mesh_pb2
from pdmesh.worker.engines.registry import DEFAULT_ENGINE, start_timeout_s
from tests.chaos.arming import Arming
from tests.chaos.disks import Disk, Disks
from tests.chaos.hosts import Hosts
from tests.chaos.links import Link, Links
from tests.chaos.plan import LinkName
from tests.mesh.checks import Footprint, is_running, unwhole
from tests.support import kv_counts

# The wall clock of one process, moved while it runs; the machine's own is never touched.
#
# `clock.c`, compiled once, is preloaded into the process and reads the seconds to add from a file that we map as well.
# libfaketime does the same and more, but would have to be installed.


_SOURCE, _DISK_SOURCE = Path(__file__).with_name("clock.c"), Path(__file__).with_name("disk.c")
_DOUBLE = struct.Struct("d")
VARIABLE = "PDMESH_CHAOS_CLOCK"


def build(folder: Path, source: Path = _SOURCE) -> Path:
    """The shared library to preload, in `folder`. Raises RuntimeError when there is no compiler, or it fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("clock jumps need a C compiler: install one, or leave them out with --kinds")
    library = folder / source.with_suffix(".so").name
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{source.name} does not compile:\n{result.stderr}")
    return library


class Clock:
    """The clock of one process, by the file that `environment` names to it. A process started again keeps it."""

    def __init__(self, library: Path, file: Path) -> None:
        self._library = library
        self._file = file
        file.write_bytes(_DOUBLE.pack(0.0))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _DOUBLE.size)

    @property
    def environment(self) -> dict[str, str]:
        """What the process has to be started with."""
        return {"LD_PRELOAD": str(self._library), VARIABLE: str(self._file)}

    def jump(self, to_s: float) -> None:
        """The process's clock is `to_s` seconds ahead of the machine's from now on (behind, if negative)."""
        self._map[:] = _DOUBLE.pack(to_s)


# The mesh's Redis, in our hands: paused, emptied, killed and started again at the same port.


class Registry:
    """Owner of an embedded Redis. `busy` is held by whoever disturbs it."""

    def __init__(self) -> None:
        self.busy = asyncio.Lock()
        self._redis = EmbeddedRedis()

    @property
    def url(self) -> str:
        """The same over restarts."""
        return self._redis.url

    @property
    def pid(self) -> int:
        return self._redis.pid

    async def start(self) -> None:
        """Starts it, the second time at the port of the first. Raises StartFailed."""
        if self._redis.port:
            self._redis = EmbeddedRedis(self._redis.port)
        await self._redis.start()

    def pause(self) -> None:
        """It hangs: connections stay, nobody gets an answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends a pause."""
        os.kill(self.pid, signal.SIGCONT)

    async def empty(self) -> None:
        """Forgets every registration."""
        redis = Redis.from_url(self.url)
        try:
            await redis.flushall()
        finally:
            await redis.aclose()

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        await self._redis.wait()

    async def stop(self) -> None:
        """Ends it for good; idempotent."""
        await self._redis.stop()


_POLL_PERIOD_S = 0.03
_STATUS_TIMEOUT_S = 10.0
_SERVING_TIMEOUT_S = 60.0
# What each takes KV over: best first is what all of one host would use. Shared memory full, its worker goes on over tcp.
_DECODE_TRANSPORTS = {"decode-0": "shm,tcp", "decode-1": "tcp", "decode-2": "grpc"}
# The same, where prefill workers fetch KV from tiers and peers: over links, but for one.
_PREFILL_TRANSPORTS = {"prefill-0": "tcp", "prefill-1": "grpc"}


@dataclass(frozen=True)
class MeshSize:
    """The model and the workers that serve it; one thread each. `engine`: of each, by name; `engine_flags`: what it is told."""

    model: Path
    num_prefill: int
    num_decode: int
    kv_memory_mb: int
    engine: str = DEFAULT_ENGINE
    engine_flags: tuple[str, ...] = ()
    num_routers: int = 2
    is_encrypted: bool = False
    kv_disk_mb: int = 0  # of the disk of each worker's tier; 0: there are no tiers
    kv_host_gb: float = 0.0  # of the first worker of each role, beside the disk
    has_mounts: bool = False  # disks are file systems, and in a namespace of ours (disks.py); else folders without a bound
    has_hosts: bool = False  # each process has one of its own, in place of links; in a namespace of ours (hosts.py)


@dataclass(frozen=True)
class Victim:
    """A worker or router, and everything by which it can be hurt; a router has no links."""

    name: str
    role: str
    member: Member
    arming: Arming
    clock: Clock
    links: dict[LinkName, Link]

    def log_pipe(self) -> asyncio.ReadTransport:
        """Return our end of the pipe that its log comes through."""
        pipe = self.member._latest._started._transport.get_pipe_transport(2)  # type: ignore[attr-defined]  # asyncio shows no way
        assert isinstance(pipe, asyncio.ReadTransport)
        return pipe


class ChaosMesh:
    """Use as an async context manager. `unexpected` lists deaths that nobody caused; what dies stays dead until `restart`."""

    def __init__(self, size: MeshSize, folder: Path) -> None:
        """`folder`, which exists, gets the logs and what the processes are controlled by."""
        self.registry = Registry()
        self.shm_busy = asyncio.Lock()  # held by whoever fills the shared memory
        self.unexpected: list[str] = []
        self.victims: tuple[Victim, ...] = ()
        self._size = size
        self._folder = folder
        self.struck: set[str] = set()  # names of workers and routers that are, or may be, unhealthy
        self._names = [
            f"{role}-{i}" for role, n in (("prefill", size.num_prefill), ("decode", size.num_decode)) for i in range(n)
        ]
        self._links = Links(self._names)
        library = build(folder)
        everybody = (*self._names, *(f"router-{i}" for i in range(size.num_routers)))
        self._armings = {name: Arming(folder / f"{name}.failpoints") for name in everybody}
        self._clocks = {name: Clock(library, folder / f"{name}.clock") for name in everybody}
        self._may_die: set[str] = set()
        self._footprint: Footprint | None = None
        self._clients: dict[str, AsyncClient] = {}  # one for each router, by its name
        self._hosts = Hosts(everybody) if size.has_hosts else None
        self._disks: Disks | None = None
        if size.kv_disk_mb:
            disk_library, num_bytes = build(folder, _DISK_SOURCE), size.kv_disk_mb << 20
            self._disks = Disks(folder / "kv", self._names, disk_library, num_bytes=num_bytes, are_mounted=size.has_mounts)
        self._kv_counts: dict[tuple[str, int], Counter[str]] = {}
        self.mesh: LocalMesh | None = None

    @property
    def routers(self) -> tuple[str, ...]:
        """Addresses for clients."""
        return self._running.router_addresses

    @property
    def tls(self) -> TlsConfig:
        """What clients need to trust the routers."""
        return self._running.tls

    @property
    def network(self) -> Hosts:
        """What connects the hosts. Raises RuntimeError where all are on one."""
        if self._hosts is None:
            raise RuntimeError("this mesh has no hosts")
        return self._hosts

    def disk_of(self, victim: Victim) -> Disk:
        """The disk of a worker's tier. Raises RuntimeError where there are no tiers."""
        if self._disks is None:
            raise RuntimeError("these workers have no tiers")
        return self._disks.of(victim.name)

    @property
    def shm_victim(self) -> Victim:
        """The decode worker that takes KV over shared memory; to all others it goes through links."""
        return self.victim("decode-0")

    def victim(self, name: str) -> Victim:
        """The worker of that name."""
        return next(victim for victim in self.victims if victim.name == name)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        if self._hosts is None:
            self._links.start()
        else:
            self._hosts.start()
        await self.registry.start()
        redis = self.registry.url
        if self._hosts is not None:
            redis = f"redis://{await self._hosts.forward(int(redis.rpartition(':')[2].partition('/')[0]))}/0"
        config = LocalMeshConfig(
            model=str(self._size.model),
            engine=self._size.engine,
            worker_python=engine_python(self._size.engine, "cpu"),
            start_timeout_s=start_timeout_s(self._size.engine),
            num_prefill=self._size.num_prefill,
            num_decode=self._size.num_decode,
            num_routers=self._size.num_routers,
            throwaway_tls=self._size.is_encrypted,
            throwaway_secret=self._size.is_encrypted,
            port=0,
            redis=redis,
            num_threads=1,
            metrics_port=0 if self._disks is not None else None,
            restart=False,
            log_dir=str(self._folder / "logs"),
            worker_args=("--kv-memory-mb", str(self._size.kv_memory_mb), *self._size.engine_flags),
            adjust=self._adjust,
        )
        self.mesh = LocalMesh(config, on_event=self._on_event)
        await self.mesh.start()
        self.victims = tuple(self._victim(member) for member in (*self.mesh.workers, *self.mesh.routers))
        self._footprint = Footprint.of(self.mesh)
        self._clients = {member.name: AsyncClient([member.address], tls=self.tls) for member in self.mesh.routers}

    async def stop(self) -> None:
        """Ends everything; idempotent."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        if self.mesh is not None:
            self._may_die.update(self._armings)
            await self.mesh.stop()
        if self._disks is not None:
            self._disks.close()
        await self._links.close()
        if self._hosts is not None:
            await self._hosts.close()
        await self.registry.stop()

    def left_behind(self) -> list[str]:
        """After `stop`: what of the mesh is still on this machine, in words."""
        left = self._disks.left_behind() if self._disks is not None else []
        if self._footprint is None:
            return left
        try:
            self._footprint.assert_gone()
        except AssertionError:
            pids = [name for name, pid in self._footprint.pids.items() if is_running(pid)]
            left.append(f"processes {pids}, or sockets or segments of the mesh, are left")
        return left

    async def take_kv_counts(self) -> Counter[str]:
        """What workers restored and fetched since the last call, less what those counted that have ended; nothing without
        tiers."""
        if self._disks is None:
            return Counter()
        before, self._kv_counts = self._kv_counts, await kv_counts.read_counts(self._running.workers)
        return kv_counts.since(before, self._kv_counts)

    async def kill(self, victim: Victim) -> None:
        """SIGKILL."""
        self._may_die.add(victim.name)
        self._running.kill(victim.name, signal.SIGKILL)

    def expect_death(self, victim: Victim) -> None:
        """A failpoint is about to kill it."""
        self._may_die.add(victim.name)

    def expect_life(self, victim: Victim) -> None:
        """It was not killed after all."""
        self._may_die.discard(victim.name)

    async def restart(self, victim: Victim) -> None:
        """Ends it in order, if it lives, and starts it again; returns when it is ready."""
        self._may_die.add(victim.name)
        await self._running.restart(victim.name)
        self._may_die.discard(victim.name)
        if self._footprint is not None:
            self._footprint.pids[f"{victim.name} {victim.member.pid}"] = victim.member.pid

    async def status(self) -> mesh_pb2.GetStatusResponse:
        """The view of a router that is not struck. Raises MeshError."""
        name = next(name for name in self._clients if name not in self.struck)
        return await self._clients[name].status(timeout=_STATUS_TIMEOUT_S)

    async def epoch_of(self, victim: Victim) -> int:
        """The incarnation that the router knows; 0: none, or a router's own."""
        views = [view for view in (await self.status()).workers if view.info.worker_id == victim.name]
        return views[0].info.epoch if views else 0

    async def until_serving(self, victim: Victim, *, former_epoch: int = 0) -> float:
        """Waits until the router has the worker alive, as another incarnation than `former_epoch` and as no second one beside it,
        or until the router answers; returns how long that took, in seconds. Raises TimeoutError."""
        started = asyncio.get_running_loop().time()
        async with asyncio.timeout(_SERVING_TIMEOUT_S):
            if victim.role == "router":
                await self._until_answers(victim)
                return asyncio.get_running_loop().time() - started
            while not self._serves(await self.status(), victim, former_epoch):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_PERIOD_S)
        return asyncio.get_running_loop().time() - started

    async def _until_answers(self, victim: Victim) -> None:
        """Waits until the router answers a client that it has not seen before, and sees a worker again."""
        async with AsyncClient([victim.member.address], tls=self.tls) as client:
            while True:
                with contextlib.suppress(MeshError):
                    status = await client.status(timeout=1.0)
                    if any(view.alive for view in status.workers):
                        return
                await asyncio.sleep(_POLL_PERIOD_S)

    def _serves(self, status: mesh_pb2.GetStatusResponse, victim: Victim, former_epoch: int) -> bool:
        views = [view for view in status.workers if view.info.worker_id == victim.name]
        return len(views) == 1 and views[0].alive and views[0].info.epoch != former_epoch

    async def leaks(self, timeout_s: float = 20.0) -> tuple[int, list[str]]:
        """(blocks, problems in words) still held when nobody asks any more and `timeout_s` seconds were not enough to free them;
        (0, []) when every pool is whole and every worker alive."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            problems: list[str] = []
            for name, client in self._clients.items():
                status = await client.status(timeout=_STATUS_TIMEOUT_S)
                problems += [f"{name} says: {problem}" for problem in (*unwhole(status), *self._not_at_rest(status))]
            if not problems:
                return 0, []
            if asyncio.get_running_loop().time() > deadline:
                return sum(view.load.num_total_blocks - view.load.num_free_blocks for view in status.workers), problems
            await asyncio.sleep(0.1)

    def _not_at_rest(self, status: mesh_pb2.GetStatusResponse) -> list[str]:
        alive = {view.info.worker_id for view in status.workers if view.alive}
        problems = [f"{name} is not alive" for name in self._names if name not in alive]
        if status.num_inflight or status.num_queued:
            problems.append(f"router: {status.num_inflight} in flight, {status.num_queued} queued")
        if status.num_token_mismatches:
            problems.append(f"router: {status.num_token_mismatches} repeated indexes with another token")
        return problems

    @property
    def _running(self) -> LocalMesh:
        assert self.mesh is not None, "the mesh has not been started"
        return self.mesh

    def _victim(self, member: Member) -> Victim:
        name = member.name
        has_links = name in self._names and self._hosts is None
        links = {link: self._links.get(name, link) for link in LinkName} if has_links else {}
        return Victim(name, member.roles[0], member, self._armings[name], self._clocks[name], links)

    def _adjust(self, plan: ProcessPlan) -> ProcessPlan:
        env = {**plan.env, **self._armings[plan.name].environment, **self._clocks[plan.name].environment}
        if self._hosts is not None:
            plan = self._hosts.on_host(plan)
            argv = (*plan.argv, "--transports", "tcp,grpc") if plan.is_worker else plan.argv
            return replace(plan, argv=argv, env=env)
        if not plan.is_worker:
            return replace(plan, env=env)
        transports = _DECODE_TRANSPORTS.get(plan.name, "shm,tcp,grpc")
        argv = (*plan.argv, *self._links.flags(plan.name), "--transports", transports)
        if self._disks is not None:
            disk = self._disks.of(plan.name)
            argv = (*argv, "--transports", _PREFILL_TRANSPORTS.get(plan.name, transports), "--kv-disk", str(disk.folder))
            if plan.name.endswith("-0") and self._size.kv_host_gb:
                argv = (*argv, "--kv-host-gb", str(self._size.kv_host_gb))
            env = {**env, **disk.environment, "LD_PRELOAD": f"{env['LD_PRELOAD']}:{disk.library}"}
        return replace(plan, argv=argv, env=env)

    def _on_event(self, event: str) -> None:
        if event.split(" ", 1)[0] not in self._may_die:
            self.unexpected.append(event)
