"""Servers of others as child processes: their output in a file, ready when their address says so, nothing of them left behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness import say
from benchmarks.peers import keeper
from benchmarks.peers.environments import PeerError, last_line, peers_folder
from pdmesh.runtime.child import ChildProcess

START_TIMEOUT_S = 600.0
_POLL_S, _HEARTBEAT_S = 0.5, 20.0
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Server:
    """One process. It is ready when `ready` says so: http://… by status 200, grpc://… by its health service."""

    name: str
    argv: Sequence[str]
    ready: str
    env: Mapping[str, str] = field(default_factory=dict)


@asynccontextmanager
async def serving(servers: Sequence[Server], timeout_s: float = START_TIMEOUT_S) -> AsyncIterator[None]:
    """Runs them, from when all are ready. PeerError says who does not get there, and why."""
    async with contextlib.AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(_running(server)) for server in servers]
        for server, process in zip(servers, processes, strict=True):
            await _wait_ready(server, process, timeout_s)
        yield


@asynccontextmanager
async def _running(server: Server) -> AsyncIterator[ChildProcess]:
    log = log_of(server.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        argv = [sys.executable, keeper.__file__, *server.argv]
        process = ChildProcess(server.name, argv, env=server.env, on_line=lambda line: print(line, file=output, flush=True))
        await process.spawn()
        try:
            yield process
        finally:
            # The last words of a dying process belong into its log, so it is open until then.
            await asyncio.shield(process.stop(keeper.ALL_S + 5))


def log_of(name: str) -> Path:
    return peers_folder() / "logs" / f"{name}.log"


async def _wait_ready(server: Server, process: ChildProcess, timeout_s: float) -> None:
    started = said = time.monotonic()
    while not await asyncio.to_thread(_answers, server.ready):
        now = time.monotonic()
        if not process.running:
            raise PeerError(f"{server.name} ended: {last_line(log_of(server.name))}")
        if now - started > timeout_s:
            raise PeerError(f"{server.name} was not ready within {timeout_s:g} s: {last_line(log_of(server.name))}")
        if now - said > _HEARTBEAT_S:
            said = now
            say(f"{server.name}: starting for {now - started:.0f} s")
        await asyncio.sleep(_POLL_S)


def _answers(ready: str) -> bool:
    kind, _, address = ready.partition("://")
    if kind == "grpc":
        return _is_healthy(address)
    try:
        with urllib.request.urlopen(ready, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _is_healthy(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def watched_shared_memory() -> Iterator[None]:
    """Says what came into shared memory meanwhile and no process has mapped. It is not removed: it may be somebody else's, who
    has not opened it yet."""
    before = _shared_memory()
    try:
        yield
    finally:
        if left := sorted(name for name in _shared_memory() - before if not _is_mapped(name)):
            say(f"left in {_SHARED_MEMORY}, by whomever: {', '.join(left)}")


def _shared_memory() -> set[str]:
    return {entry.name for entry in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()


def _is_mapped(name: str) -> bool:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(_SHARED_MEMORY / name) in (entry / "maps").read_text():
                return True
    return False
