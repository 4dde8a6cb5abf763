"""Lets a test in another language reach into the mesh: over HTTP, on loopback.

POST /kill/router-0      kills a process of the mesh; answers once it is gone
POST /ready              answers once all processes are ready again
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdmesh.launcher.mesh import LocalMesh
from tests.mesh.checks import is_running
from tests.support.waiting import eventually


@asynccontextmanager
async def controlled(mesh: LocalMesh) -> AsyncIterator[str]:
    """The URL of the control, without a path."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        try:
            await _do(mesh, path)
            status, text = "200 OK", ""
        except (AssertionError, KeyError, RuntimeError, TimeoutError) as error:
            status, text = "500 Internal Server Error", repr(error)
        body = text.encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def _do(mesh: LocalMesh, path: str) -> None:
    action, _, name = path.removeprefix("/").partition("/")
    if action == "kill":
        pid = mesh.member(name).pid
        mesh.kill(name, signal.SIGKILL)
        await eventually(lambda: not is_running(pid))
    elif action == "ready":
        await ready(mesh)
    else:
        raise KeyError(path)


async def ready(mesh: LocalMesh) -> None:
    """Returns once all processes are ready, those too that start again."""
    await eventually(lambda: _has_addresses(mesh), timeout_s=60)
    await mesh.wait_ready(60)


def _has_addresses(mesh: LocalMesh) -> bool:
    """A router that starts again has no address yet."""
    try:
        return bool(mesh.router_addresses)
    except RuntimeError:
        return False
