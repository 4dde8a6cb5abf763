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

from pdmesh.runtime import ports
from pdmesh.runtime.child import ManagedProcess, restart_delay_s
from pdmesh.runtime.config import ConfigError, parse
from pdmesh.runtime.rpc.channel import connect
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc
from router import processes
from router.auth.tenants import Tenants
from router.config import RouterConfig
from router.processes import MAX_MISSED, Pulse, Replica, replica_config
from tests.support.waiting import alive, eventually


def test_restarts_slow_down_to_a_bound() -> None:
    delays = [restart_delay_s(number, first_s=0.5, max_s=10.0) for number in range(1, 40)]
    assert delays == sorted(delays) and delays[0] == 0.5 and delays[-1] == 10.0


@pytest.mark.parametrize(("first", "ports"), [(None, [None, None]), (0, [0, 0]), (9464, [9464, 9465])])
def test_each_process_shows_its_metrics_on_a_port_of_its_own(first: int | None, ports: list[int | None]) -> None:
    config = RouterConfig(models=("m=f",), processes=2, telemetry=TelemetryConfig(metrics_port=first))
    assert [replica_config(config, "r", number).telemetry.metrics_port for number in range(2)] == ports


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--metrics-port", "65534", "--processes", "3"], "--metrics-port: .*--processes.* at most 65533"),
        (
            ["--metrics-port", "8099", "--processes", "2", "--port", "8100"],
            "--metrics-port: .*--processes.* include 8100, which is --port's",
        ),
        (["--metrics-port", "8000", "--http-port", "8000"], "--metrics-port: .* include 8000, which is --http-port's"),
    ],
)
def test_ports_of_metrics_that_do_not_suffice_are_refused_at_the_start(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(RouterConfig, ["--models", "m=f", *flags], {}, prog="router")


@pytest.mark.parametrize(
    "flags",
    [
        ["--metrics-port", "65533", "--processes", "3"],
        ["--metrics-port", "8100", "--metrics-host", "127.0.0.2", "--port", "8100"],
        ["--metrics-port", "0", "--processes", "3", "--port", "0"],
    ],
)
def test_ports_of_metrics_that_suffice_are_taken(flags: list[str]) -> None:
    parse(RouterConfig, ["--models", "m=f", *flags], {}, prog="router")


@pytest.mark.parametrize(("inflight", "queued", "num"), [(256, 256, 2), (7, 1, 3), (1, 0, 4)])
def test_processes_divide_the_limits(inflight: int, queued: int, num: int) -> None:
    config = RouterConfig(models=("m=f",), max_inflight=inflight, max_queued=queued, processes=num)
    parts = [replica_config(config, "r", number) for number in range(num)]
    assert sum(part.max_inflight for part in parts) == max(inflight, num)
    assert sum(part.max_queued for part in parts) == queued
    assert sum(part.max_queued_bytes for part in parts) == config.max_queued_bytes
    assert sum(part.max_streams for part in parts) == config.max_streams
    assert sum(part.http_max_connections for part in parts) == config.http_max_connections
    assert sum(part.tenants_share for part in parts) == pytest.approx(1.0)
    assert [part.router_id for part in parts] == [f"r-{number}" for number in range(num)]
    for part in parts:
        part.validate()


def test_without_redis_each_process_gives_out_its_part_of_a_tenants_limits(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[default]\ntokens_per_s = 1000\nmax_inflight = 8")
    config = RouterConfig(models=("m=f",), tenants=str(path), processes=4)
    parts = [replica_config(config, "r", number) for number in range(4)]
    limits = [Tenants(part.tenants, part.tenants_share).limits_of("t") for part in parts]
    assert sum(limit.tokens_per_s or 0 for limit in limits) == pytest.approx(1000)
    assert sum(limit.burst for limit in limits) == pytest.approx(10_000)
    assert sum(limit.max_inflight or 0 for limit in limits) == 8


def test_silence_is_counted_in_periods_of_the_listener() -> None:
    pulse = Pulse()
    for _ in range(3):
        assert not any(pulse.is_hung() for _ in range(MAX_MISSED))
        pulse.beat()
    assert [pulse.is_hung() for _ in range(MAX_MISSED + 1)] == [False] * MAX_MISSED + [True]


_CHILD = """
import asyncio, sys
from router.processes import beat_forever
from pdmesh.runtime import process
async def main(life):
    life.ready("127.0.0.1:1")
    asyncio.create_task(beat_forever())
    await life.wait_for_stop()
sys.exit(process.run(main))
"""


class _Small(Replica):
    """With a child that starts at once."""

    def _new(self) -> ManagedProcess:
        return ManagedProcess(self.name, [sys.executable, "-c", _CHILD], on_line=self._heard)


async def test_one_that_hangs_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "BEAT_PERIOD_S", 0.25)  # the child's is longer, and still heard in time
    replica = _Small(RouterConfig(models=("m=f",), router_id="r"))
    await replica.start()
    try:
        first = replica._process.pid
        await eventually(lambda: replica._pulse.num_missed >= 2)
        await eventually(lambda: replica._pulse.num_missed <= 1)
        assert replica._process.pid == first
        os.kill(first, signal.SIGSTOP)
        await eventually(lambda: replica._process.running and replica._process.pid != first, timeout_s=30)
        assert not alive(first)
    finally:
        await replica.stop()


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


@pytest.mark.skipif(not ports.can_share(), reason="this system does not share ports")
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
