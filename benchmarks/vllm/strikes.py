"""Kills of a mesh's processes while a request runs, and the return of what was killed."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh

BACK_S = 300.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Struck:
    """A process that was killed."""

    name: str
    pid: int


async def strike(mesh: LocalMesh, client: AsyncClient, kind: str) -> Struck:
    """Kill the router, the prefill worker, or the decode worker that has the one request that runs, by SIGKILL."""
    name = await busy_decode(client) if kind == "decode" else f"{kind}-0"
    struck = Struck(name, mesh.pids[name])
    mesh.kill(name, signal.SIGKILL)
    return struck


async def busy_decode(client: AsyncClient) -> str:
    """Return the decode worker that has a request. Raises RuntimeError if none shows one for some seconds."""
    for _ in range(100):
        status = await client.status(timeout=30)
        for worker in status.workers:
            has_any = worker.load.num_running + worker.load.num_reserved > 0
            if worker.alive and worker.info.worker_id.startswith("decode") and has_any:
                return worker.info.worker_id
        await asyncio.sleep(_POLL_S)
    raise RuntimeError("no decode worker has a request: it was over before the blow fell; ask for more tokens")


async def back(mesh: LocalMesh, struck: Struck) -> None:
    """Return once it has been started again and every router sees it. Raises TimeoutError."""
    async with asyncio.timeout(BACK_S):
        while mesh.pids.get(struck.name, struck.pid) == struck.pid:  # noqa: ASYNC110  # the event happens in another process
            await asyncio.sleep(_POLL_S)
    await mesh.wait_ready(BACK_S)
