"""Several processes behind one port: both get connections, one that is killed comes back, SIGTERM ends all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc.aio
import httpx
import pytest

from protos.v1 import mesh_pb2, mesh_pb2_grpc
from router.config import RouterConfig
from router.processes import MAX_BACKOFF_S, backoff_s, replica_config
from runtime import ports
from runtime.channel import connect
from runtime.child import ManagedProcess
from runtime.config import ConfigError
from tests.support.waiting import alive, eventually


def test_restarts_slow_down_to_a_bound() -> None:
    delays = [backoff_s(number) for number in range(1, 40)]
    assert delays == sorted(delays) and delays[0] < 1 and delays[-1] == MAX_BACKOFF_S


@pytest.mark.parametrize(("inflight", "queued", "processes"), [(256, 256, 2), (7, 1, 3), (1, 0, 4)])
def test_processes_divide_the_limits(inflight: int, queued: int, processes: int) -> None:
    config = RouterConfig(models=("m=f",), max_inflight=inflight, max_queued=queued, processes=processes)
    parts = [replica_config(config, "r", number) for number in range(processes)]
    assert sum(part.max_inflight for part in parts) == max(inflight, processes)
    assert sum(part.max_queued for part in parts) == queued
    assert [part.router_id for part in parts] == [f"r-{number}" for number in range(processes)]
    for part in parts:
        part.validate()


def test_a_reserved_port_is_shared_with_those_who_ask_only() -> None:
    with ports.reserve("127.0.0.1", 0, "--port") as held, socket.socket() as sharing, socket.socket() as stranger:
        port = held.getsockname()[1]
        ports.share(sharing)
        sharing.bind(("127.0.0.1", port))
        sharing.listen()
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with pytest.raises(ConfigError, match="--port"):
            ports.reserve("127.0.0.1", port, "--port")
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            sharing.accept()[0].close()  # the one that does not listen gets nobody


async def _who(address: str) -> str:
    """The router that a new connection meets; empty: none."""
    async with connect(address) as channel:
        stub: mesh_pb2_grpc.MeshAsyncStub = mesh_pb2_grpc.MeshStub(channel)
        try:
            return (await stub.GetStatus(mesh_pb2.GetStatusRequest(), timeout=5)).router_id
        except grpc.aio.AioRpcError:
            return ""


async def _meet(address: str, wanted: set[str]) -> None:
    """New connections until all of `wanted` have been met."""
    met: set[str] = set()
    async with asyncio.timeout(60):
        while not wanted <= met:
            met.update(await asyncio.gather(*(_who(address) for _ in range(8))))


async def test_both_serve_and_one_that_is_killed_comes_back(model_folder: Path) -> None:
    flags = ("--port", "0", "--http-port", "0", "--processes", "2", "--router-id", "r", "--linger-s", "0")
    lines: list[str] = []
    command = [sys.executable, "-m", "router", *flags, "--models", f"tiny={model_folder}", "--exit-with-parent"]
    parent = ManagedProcess("routers", command, on_line=lines.append)
    ready = await parent.start(60)
    try:
        assert (ready["router_id"], ready["processes"]) == ("r", 2)
        await _meet(parent.address, {"r-0", "r-1"})
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{ready['http_url']}/health/live")).status_code == 200
        taken = [sys.executable, "-m", "router", "--port", parent.address.rpartition(":")[2], "--processes", "2"]
        second = await asyncio.to_thread(
            subprocess.run, [*taken, "--models", f"tiny={model_folder}"], capture_output=True, text=True, check=False, timeout=60
        )
        assert second.returncode == 2 and "--port" in second.stderr and "Traceback" not in second.stderr
        killed = _children(parent.pid)[0]
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: any("starting it again" in line for line in lines), timeout_s=30)
        assert await _who(parent.address) in ("r-0", "r-1")
        await _meet(parent.address, {"r-0", "r-1"})
        children = _children(parent.pid)
        assert len(children) == 2 and killed not in children
        parent.signal(signal.SIGTERM)
        assert await parent.wait() == 0
        assert not any(alive(child) for child in children)
    finally:
        await parent.stop(0)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
