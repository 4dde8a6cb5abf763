"""The launcher, with stand-in processes: command lines, supervision, stopping; no process is left behind whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.launcher import mesh as launcher_mesh
from pdmesh.launcher import sidecars
from pdmesh.launcher.member import MAX_BACKOFF_S, Member, backoff_s, how_it_ended
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan, check_packages, router_plans, with_port, worker_plan, worker_plans
from pdmesh.launcher.sidecars import collector_of
from pdmesh.runtime.child import StartFailed
from pdmesh.runtime.registry.redis_link import why_silent

ROOT = Path(__file__).parents[2]
WORKERS = ("prefill-0", "decode-0")


def plan(name: str, kind: str, *more: str) -> ProcessPlan:
    argv = (sys.executable, "-m", "tests.pdmesh.fake_service", kind, *more, "--port", "0")
    return ProcessPlan(name, (kind,), argv, {"PYTHONPATH": str(ROOT)})


def exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # Whoever adopts an orphan may be slow to collect it: a zombie does nothing any more.
    return state != "Z"


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.02)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_mesh, "worker_plans", lambda *_: [plan(name, "worker") for name in WORKERS])
    monkeypatch.setattr(launcher_mesh, "router_plans", lambda *_: [plan("router-0", "router", *WORKERS)])


def config(tmp_path: Path, **more: object) -> LocalMeshConfig:
    return LocalMeshConfig(model="unused", log_dir=str(tmp_path / "logs"), start_timeout_s=30, **more)  # type: ignore[arg-type]


def flag(plan: ProcessPlan, name: str) -> str:
    return plan.argv[plan.argv.index(name) + 1]


def test_plans_name_workers_roles_and_share_the_cores() -> None:
    plans = worker_plans(LocalMeshConfig(model="/m/small", num_prefill=1, num_decode=2, num_both=1), "redis://r", cores=range(8))
    assert [(p.name, flag(p, "--roles")) for p in plans] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
        ("worker-0", "prefill,decode"),
    ]
    assert all(p.is_worker and flag(p, "--worker-id") == p.name for p in plans)
    assert {flag(p, "--num-threads") for p in plans} == {"2"} and {p.env["OMP_NUM_THREADS"] for p in plans} == {"2"}
    assert {flag(p, "--kv-memory-share") for p in plans} == {"0.15"}
    on_a_gpu = worker_plans(LocalMeshConfig(model="/m/small", device="cuda", num_both=1), "redis://r", cores=range(8))
    assert {flag(p, "--kv-memory-share") for p in on_a_gpu} == {f"{0.85 / len(on_a_gpu):.4g}"}
    assert flag(plans[0], "--model-name") == "small"
    assert plans[0].env["PDMESH_REDIS"] == "redis://r" and "redis://r" not in plans[0].argv


def test_threads_are_at_least_one_and_can_be_given() -> None:
    assert flag(worker_plans(LocalMeshConfig(model="m"), "", cores=[3])[0], "--num-threads") == "1"
    assert flag(worker_plans(LocalMeshConfig(model="m", num_threads=5), "", cores=[3])[0], "--num-threads") == "5"


def test_workers_share_the_cores_of_all_that_there_may_be() -> None:
    """Of those that are there and those that are to come, and no more than there are."""
    shared = LocalMeshConfig(model="m", num_both=1, num_prefill=0, num_decode=0, max_workers=4, core_table="/t")
    assert [flag(worker_plans(shared, "", cores=range(8))[0], name) for name in ("--num-threads", "--shared-cores")] == ["2", "8"]
    assert flag(worker_plan(shared, "worker-1", "", cores=range(8)), "--shared-cores") == "8"
    assert flag(worker_plans(shared, "", cores=range(2))[0], "--shared-cores") == "2"
    assert flag(worker_plans(replace(shared, num_threads=1), "", cores=range(8))[0], "--shared-cores") == "4"
    assert "--shared-cores" not in worker_plans(replace(shared, core_table=""), "", cores=range(8))[0].argv


def test_workers_are_bound_to_disjoint_cores_where_there_are_enough() -> None:
    wanted = LocalMeshConfig(model="m", num_prefill=1, num_decode=2, bind_cpus=True)
    plans = worker_plans(wanted, "", cores=[0, 1, 4, 5, 6, 7, 9])
    assert [flag(p, "--cpus") for p in plans] == ["0,1", "4,5", "6,7"]
    assert {flag(p, "--num-threads") for p in plans} == {"2"}
    for unbound in (replace(wanted, bind_cpus=False), replace(wanted, num_threads=3), replace(wanted, num_decode=9)):
        assert not any("--cpus" in p.argv for p in worker_plans(unbound, "", cores=range(8)))


def test_routers_take_consecutive_ports_and_keep_them() -> None:
    plans = router_plans(LocalMeshConfig(model="/m/small", num_routers=2, port=8100), "redis://r")
    assert [flag(p, "--port") for p in plans] == ["8100", "8101"]
    assert flag(plans[0], "--models") == "small=/m/small"
    assert flag(with_port(plans[0], 9), "--port") == "9"
    assert {flag(p, "--port") for p in router_plans(LocalMeshConfig(model="m", num_routers=2, port=0), "")} == {"0"}


def test_http_ports_follow_the_same_way_and_none_means_no_http() -> None:
    plans = router_plans(LocalMeshConfig(model="m", num_routers=2, http_port=8000), "")
    assert [flag(p, "--http-port") for p in plans] == ["8000", "8001"]
    assert flag(with_port(plans[1], 9, "--http-port"), "--http-port") == "9" and flag(plans[1], "--port") == "8101"
    assert {flag(p, "--http-port") for p in router_plans(LocalMeshConfig(model="m", num_routers=2, http_port=0), "")} == {"0"}
    assert flag(router_plans(LocalMeshConfig(model="m"), "")[0], "--http-port") == ""  # whatever the environment says


@pytest.mark.parametrize("wrong", [{"num_decode": 0}, {"num_routers": 0}, {"num_prefill": -1}])
def test_configuration_is_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LocalMesh(LocalMeshConfig(model="m", **wrong))  # type: ignore[arg-type]


def test_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(StartFailed, match=r"\(torch\).*pip install 'pdmesh\[local\]'"):
        check_packages()


def test_backoff_and_words() -> None:
    assert [backoff_s(n) for n in (0, 1, 2, 3)] == [0.0, 0.5, 1.0, 2.0]
    assert backoff_s(1000) == MAX_BACKOFF_S
    assert how_it_ended(-9) == "was ended by SIGKILL" and how_it_ended(3) == "ended with code 3"


async def test_mesh_starts_serves_and_leaves_nothing(stand_ins: None, tmp_path: Path) -> None:
    async with LocalMesh(config(tmp_path)) as mesh:
        assert mesh.started and set(mesh.pids) == {"redis", "router-0", *WORKERS}
        assert [worker.name for worker in mesh.workers] == list(WORKERS)
        pids = mesh.pids
        assert all(exists(pid) for pid in pids.values())
        assert flag(mesh.routers[0].plan, "--port") == mesh.router_address.rpartition(":")[2]
    assert not any(exists(pid) for pid in pids.values())
    assert "worker says hello" in (tmp_path / "logs" / "decode-0.log").read_text()


async def test_a_router_between_two_lives_is_waited_for(stand_ins: None, tmp_path: Path) -> None:
    async with LocalMesh(config(tmp_path)) as mesh:
        mesh.kill("router-0", signal.SIGKILL)
        await until(lambda: not _has_address(mesh))
        await mesh.wait_ready(20)
        assert mesh.router_address


def _has_address(mesh: LocalMesh) -> bool:
    try:
        return bool(mesh.router_address)
    except RuntimeError:
        return False


async def test_dead_worker_is_reported_and_comes_back(stand_ins: None, tmp_path: Path) -> None:
    events: list[str] = []
    async with LocalMesh(config(tmp_path), on_event=events.append) as mesh:
        first = mesh.member("decode-0").pid
        mesh.kill("decode-0", signal.SIGKILL)
        await until(lambda: any("decode-0 is back" in event for event in events))
        await mesh.wait_ready(20)
        assert mesh.member("decode-0").pid != first and mesh.member("decode-0").num_restarts == 1
        assert "was ended by SIGKILL; starting it again" in events[0]
        await mesh.restart("prefill-0")
        assert mesh.member("prefill-0").running
        with pytest.raises(KeyError, match="decode-0"):
            mesh.member("decode-7")


async def test_dead_redis_is_reported_and_comes_back_on_its_port(stand_ins: None, tmp_path: Path) -> None:
    events: list[str] = []
    async with LocalMesh(config(tmp_path), on_event=events.append) as mesh:
        url, first = mesh.redis_url, mesh.redis_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: any("redis is back" in event for event in events))
        assert f"redis (pid {first}) was ended by SIGKILL" in events[0] and "starting it again" in events[0]
        assert mesh.redis_url == url and mesh.redis_pid not in (None, first)
        assert await why_silent(url) is None
        last = mesh.redis_pid
    assert last is not None and not exists(last)


async def test_dead_redis_without_restart_is_only_reported(stand_ins: None, tmp_path: Path) -> None:
    events: list[str] = []
    async with LocalMesh(config(tmp_path, restart=False), on_event=events.append) as mesh:
        assert mesh.redis_pid is not None
        os.kill(mesh.redis_pid, signal.SIGKILL)
        await until(lambda: bool(events))
        assert "starting" not in events[0] and mesh.redis_pid is None and "redis" not in mesh.pids


async def test_stopped_while_redis_is_between_two_lives(stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sidecars, "backoff_s", lambda _: 60.0)
    events: list[str] = []
    async with LocalMesh(config(tmp_path), on_event=events.append) as mesh:
        assert mesh.redis_pid is not None
        os.kill(mesh.redis_pid, signal.SIGKILL)
        await until(lambda: bool(events))
        pids = mesh.pids
        assert set(pids) == {"router-0", *WORKERS}
    assert not any(exists(pid) for pid in pids.values())


@pytest.mark.parametrize(
    ("url", "problem"), [("redis://127.0.0.1:1", "does not answer.*leave out --redis"), ("7", "no Redis URL")]
)
async def test_redis_of_the_user_has_to_answer(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, problem: str
) -> None:
    monkeypatch.setattr(launcher_mesh, "_REDIS_PATIENCE_S", 0.1)
    mesh = LocalMesh(config(tmp_path, redis=url))
    with pytest.raises(StartFailed, match=problem):
        await mesh.start()
    assert mesh.pids == {}


async def test_a_console_is_told_who_the_routers_are_and_everybody_where_it_takes_traces(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PDMESH_OTLP_ENDPOINT", "collector.example:4317")
    mesh = LocalMesh(config(tmp_path, console_port=0))
    for _ in range(2):  # the same mesh may be started again
        async with mesh:
            assert mesh.console is not None and mesh.console_url.startswith("http://127.0.0.1:")
            endpoint = mesh.config.env["PDMESH_OTLP_ENDPOINT"]
            assert flag(mesh.console.plan, "--otlp-port") == endpoint.rpartition(":")[2]
            assert flag(mesh.console.plan, "--routers") == mesh.router_address
            assert flag(mesh.console.plan, "--forward-otlp") == "http://collector.example:4317"
            assert not mesh.console.plan.is_worker
            page = await asyncio.to_thread(_read, mesh.console_url)
            assert "pdmesh console" in page
            mesh.kill("console")
            await until(lambda: mesh.member("console").num_restarts == 1 and mesh.member("console").running)
            pids = mesh.pids
            assert "console" in pids
        assert not any(exists(pid) for pid in pids.values()) and not mesh.config.env


async def test_a_page_whose_port_is_taken_ends_the_start_at_once(stand_ins: None, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mesh = LocalMesh(config(tmp_path, console_port=taken.getsockname()[1]))
        with pytest.raises(StartFailed, match=r"--console-port: cannot listen .* --no-console"):
            await mesh.start()
    assert mesh.pids == {} and mesh.workers == ()


def test_processes_with_a_console_send_their_traces_to_it_and_others_where_they_like() -> None:
    told = LocalMeshConfig(model="m", env={"PDMESH_OTLP_ENDPOINT": "127.0.0.1:9"})
    for each in (*worker_plans(told, "", cores=[0]), *router_plans(told, "")):
        assert each.env["PDMESH_OTLP_ENDPOINT"] == "127.0.0.1:9"
    assert "PDMESH_OTLP_ENDPOINT" not in router_plans(LocalMeshConfig(model="m"), "")[0].env


@pytest.mark.parametrize("said", ["", "http://environment.example:4317"])
async def test_a_console_hands_on_to_the_collector_that_was_named(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    """By the flag, whatever the environment says; and every process sends to the console alone."""
    monkeypatch.setenv("PDMESH_OTLP_ENDPOINT", said)
    async with LocalMesh(config(tmp_path, console_port=0, otlp_endpoint="https://named.example:4317")) as mesh:
        assert mesh.console is not None
        assert flag(mesh.console.plan, "--forward-otlp") == "https://named.example:4317"
        everybody = (*worker_plans(mesh.config, "", cores=[0]), *router_plans(mesh.config, ""))
        own = f"127.0.0.1:{flag(mesh.console.plan, '--otlp-port')}"
        assert {plan.env["PDMESH_OTLP_ENDPOINT"] for plan in everybody} == {own}


def test_a_collector_that_cannot_be_read_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "no collector at all")
    with pytest.raises(StartFailed, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        collector_of({})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")  # not meant for us
    assert collector_of({}) == ""
    assert collector_of({"PDMESH_OTLP_ENDPOINT": "https://there:1"}) == "https://there:1"
    assert collector_of({"PDMESH_OTLP_ENDPOINT": "https://there:1"}, "named:2") == "https://there:1"
    assert collector_of({}, "named:2") == "http://named:2"


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


async def test_without_restart_death_is_only_reported(stand_ins: None, tmp_path: Path) -> None:
    events: list[str] = []
    async with LocalMesh(config(tmp_path, restart=False), on_event=events.append) as mesh:
        mesh.kill("decode-0")
        await until(lambda: bool(events))
        assert "starting" not in events[0] and not mesh.member("decode-0").running


async def test_member_that_cannot_start_is_tried_again(tmp_path: Path) -> None:
    events: list[str] = []
    member = Member(plan("decode-0", "worker"), tmp_path, events.append, restart=True, start_timeout_s=20)
    await member.start()
    member.plan = plan("decode-0", "broken")
    member.kill(signal.SIGKILL)
    await until(lambda: sum("ended with code 3; starting it again" in event for event in events) >= 1)
    await member.stop(grace_s=2)
    assert not member.running
    assert any("the model does not fit" in event for event in events)


async def test_failed_start_says_why_and_leaves_nothing(stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans = [plan("prefill-0", "worker"), plan("decode-0", "broken")]
    monkeypatch.setattr(launcher_mesh, "worker_plans", lambda *_: plans)
    mesh = LocalMesh(config(tmp_path))
    with pytest.raises(StartFailed, match=r"(?s)decode-0 ended with code 3.*12 GB needed"):
        await mesh.start()
    assert mesh.pids == {} and not mesh.started


async def test_start_that_takes_too_long_fails(stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launcher_mesh, "worker_plans", lambda *_: [plan("decode-0", "silent")])
    mesh = LocalMesh(LocalMeshConfig(model="unused", log_dir=str(tmp_path), start_timeout_s=1.5))
    with pytest.raises(StartFailed, match=r"(?s)decode-0 was not ready within 1.5 s.*silent says hello"):
        await mesh.start()
    assert mesh.pids == {}


async def test_cancelled_start_leaves_nothing(stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launcher_mesh, "worker_plans", lambda *_: [plan("decode-0", "silent")])
    mesh = LocalMesh(config(tmp_path))
    starting = asyncio.create_task(mesh.start())
    log = tmp_path / "logs" / "decode-0.log"
    await until(log.exists)
    pids = mesh.pids
    assert "decode-0" in pids
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(exists(pid) for pid in pids.values())


_KILLED_PARENT = """
import asyncio, json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
from pdmesh.launcher import mesh as launcher_mesh
from tests.pdmesh import test_launcher as t
launcher_mesh.worker_plans = lambda *_: [t.plan(name, "worker") for name in t.WORKERS]
launcher_mesh.router_plans = lambda *_: [t.plan("router-0", "router", *t.WORKERS)]
async def main():
    async with launcher_mesh.LocalMesh(launcher_mesh.LocalMeshConfig(model="unused", log_dir=sys.argv[1])) as mesh:
        print(json.dumps(mesh.pids), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_nothing_outlives_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED_PARENT, str(tmp_path)]
    parent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    assert parent.stdout is not None
    pids = json.loads(await asyncio.wait_for(parent.stdout.readline(), 30))
    assert len(pids) == 4
    parent.send_signal(number)
    await asyncio.wait_for(parent.wait(), 20)
    await until(lambda: not any(exists(pid) for pid in pids.values()))
