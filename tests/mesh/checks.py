"""What must be true after every test: pools whole, no process, socket or shared-memory segment left."""

import asyncio
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.v1 import mesh_pb2


def unwhole(status: mesh_pb2.GetStatusResponse) -> list[str]:
    """What each live worker still holds, in words; empty when every pool is whole."""
    problems = []
    for worker in status.workers:
        load = worker.load
        busy = load.num_running + load.num_waiting + load.num_reserved + load.num_held
        if worker.alive and (busy or load.num_free_blocks != load.num_total_blocks):
            problems.append(f"{worker.info.worker_id}: {load.num_free_blocks}/{load.num_total_blocks} free, {busy} busy: {load}")
    return problems


async def assert_whole(mesh: LocalMesh, timeout_s: float = 15.0) -> None:
    """Waits until every worker reports a whole pool and the router has nothing in flight."""
    async with AsyncClient(mesh.router_addresses, tls=mesh.tls) as client:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            status = await client.status(timeout=10)
            problems = unwhole(status)
            if status.num_inflight or status.num_queued:
                problems.append(f"router: {status.num_inflight} in flight, {status.num_queued} queued")
            if not problems and status.num_token_mismatches == 0:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError("; ".join(problems) or f"{status.num_token_mismatches} token mismatches")
            await asyncio.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether the process lives (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def shared_memory_names() -> set[str]:
    """Named segments; ours are anonymous, so none may ever appear."""
    folder = Path("/dev/shm")
    return set(os.listdir(folder)) if folder.is_dir() else set()


def abstract_sockets(pids: Collection[int]) -> set[str]:
    """Names of the abstract Unix sockets that these processes have, without the leading zero byte."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if " @pdmesh" in line]
    descriptors = _descriptors(pids) if lines else set()
    return {fields[-1][1:] for fields in lines if f"socket:[{fields[6]}]" in descriptors}


def _descriptors(pids: Collection[int]) -> set[str]:
    found = set[str]()
    for link in [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]:
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(os.readlink(link))
    return found


@dataclass
class Footprint:
    """What a mesh has on this machine while it runs, so that a test can see that all of it is gone."""

    pids: dict[str, int]
    sockets: set[str]
    segments_before: set[str]

    @classmethod
    def of(cls, mesh: LocalMesh) -> Self:
        """Of a mesh that has just started."""
        pids = dict(mesh.pids)
        return cls(pids, abstract_sockets(pids.values()), shared_memory_names())

    def grow(self, mesh: LocalMesh) -> None:
        """Also what the mesh has now: processes that were started again."""
        now = mesh.pids
        self.pids |= {f"{name} {pid}": pid for name, pid in now.items()}
        self.sockets |= abstract_sockets(now.values())

    def assert_gone(self) -> None:
        """After the mesh has stopped."""
        assert not [name for name, pid in self.pids.items() if is_running(pid)]
        assert not [name for name in self.sockets if f"@{name}" in Path("/proc/net/unix").read_text()]
        assert not [name for name in shared_memory_names() - self.segments_before if "pdmesh" in name]
