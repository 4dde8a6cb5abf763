"""Real processes: ready line, signals, exit codes, and nobody left behind."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pdmesh.platform import capabilities, parent_death_program
from pdmesh.runtime.child import ManagedProcess, StartFailed
from pdmesh.runtime.config import EXIT_USAGE, ConfigError
from pdmesh.runtime.process import Lifecycle, run
from tests.support.waiting import alive, eventually

Launch = Callable[..., ManagedProcess]


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    async with AsyncExitStack() as stack:

        def make(mode: str, **options: object) -> ManagedProcess:
            argv = [sys.executable, "-m", "tests.runtime.service", mode]
            process = ManagedProcess(mode, argv, **options)  # type: ignore[arg-type]
            stack.push_async_callback(process.stop, 0.1)
            return process

        yield make


async def test_ready_line_progress_output_and_a_clean_stop(launch: Launch) -> None:
    lines: list[str] = []
    progress: list[str] = []
    process = launch("plain", on_line=lines.append)
    ready = await process.start(30, progress.append)
    assert (ready["address"], ready["role"], ready["pid"]) == ("127.0.0.1:1", "test", process.pid)
    assert process.address == "127.0.0.1:1"
    assert process.running
    assert progress == ["warming up"]
    assert await process.stop(30) == 0
    assert lines == ["a line of its own", "drained after SIGTERM"]
    assert not process.running
    assert await process.stop() == 0


async def test_a_service_leaves_no_core_dump(launch: Launch) -> None:
    process = launch("plain")
    await process.start(30)
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_CORE)
    assert (soft, hard) == (0, resource.getrlimit(resource.RLIMIT_CORE)[1])


async def test_ctrl_c_is_a_clean_stop_too(launch: Launch) -> None:
    process = launch("plain")
    await process.start(30)
    process.signal(signal.SIGINT)
    assert await process.wait() == 0
    assert "drained after SIGINT" in process.output_tail


async def test_a_second_signal_ends_at_once(launch: Launch) -> None:
    process = launch("stubborn")
    await process.start(30)
    process.signal(signal.SIGTERM)
    await eventually(lambda: "stopping" in process.output_tail)
    process.signal(signal.SIGTERM)
    assert await process.wait() == 128 + signal.SIGTERM


async def test_who_does_not_stop_within_the_grace_is_killed(launch: Launch) -> None:
    process = launch("stubborn")
    await process.start(30)
    assert await process.stop(grace_s=0.1) == -signal.SIGKILL


async def test_a_paused_process_is_stopped(launch: Launch) -> None:
    process = launch("plain")
    await process.start(30)
    process.signal(signal.SIGSTOP)
    assert await process.stop(30) == 0


async def test_a_stop_during_a_slow_start(launch: Launch) -> None:
    seen: list[str] = []
    process = launch("slow_start")
    with pytest.raises(StartFailed, match=r"slow_start was not ready within 3 s"):
        await process.start(3, seen.append)
    assert seen == ["loading"]
    assert process.returncode == -signal.SIGKILL
    await process.spawn()
    await eventually(lambda: _handles_sigterm(process.pid))
    assert await process.stop(30) == 0


async def test_a_process_that_breaks_says_why(launch: Launch) -> None:
    with pytest.raises(StartFailed, match=r"broken ended with code 1; the end of its output:\nabout to break\n(.|\n)*on purpose"):
        await launch("broken").start(30)


async def test_a_wrong_setting_is_one_line_and_code_2(launch: Launch) -> None:
    expected = r"ended with code 2; the end of its output:\nservice\.py: --port: cannot listen; choose another$"
    with pytest.raises(StartFailed, match=expected):
        await launch("misconfigured").start(30)


async def test_a_fatal_error_in_the_background_is_code_1(launch: Launch) -> None:
    process = launch("failing")
    await process.start(30)
    assert await process.wait() == 1
    assert "engine lost" in process.output_tail


async def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(StartFailed, match="cannot start no-such-command: No such file"):
        await ManagedProcess("x", ["no-such-command"]).start(30)


@pytest.mark.parametrize("without", ["", "parent_death"])
@pytest.mark.parametrize("paused", [False, True])
async def test_children_die_with_a_parent_that_is_killed(
    launch: Launch, paused: bool, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, without)
    parent = launch("parent")
    child_pid = int(str((await parent.start(30))["child_pid"]))
    assert alive(child_pid)
    if paused:
        os.kill(child_pid, signal.SIGSTOP)
    parent.signal(signal.SIGKILL)
    await parent.wait()
    await eventually(lambda: not alive(child_pid))


@pytest.mark.parametrize("without", ["", "parent_death"])
def test_exit_with_parent_without_a_wrapper(without: str) -> None:
    program = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-m', 'tests.runtime.service', 'orphanable'], stdout=subprocess.PIPE); "
        "print(child.stdout.readline().decode(), end='', flush=True); time.sleep(600)"
    )
    env = {**os.environ, "EXIT_WITH_PARENT": "1", capabilities.VARIABLE: without}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child_pid = json.loads(parent.stdout.readline())["pid"]
        parent.kill()
    asyncio.run(eventually(lambda: not alive(child_pid)))


def test_a_child_dies_with_a_parent_that_has_a_thousand_files() -> None:
    """The watcher's end of the pipe has a number that select() does not know."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048 if hard == resource.RLIM_INFINITY else min(hard, 2048)), hard))
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1100)
    program = [sys.executable, "-I", "-S", parent_death_program.__file__, str(os.getpid()), str(high)]
    command = [*program, sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(high,))
    try:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        os.close(writing)  # as a parent's end does
        assert child.wait(30) == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
        os.close(reading)
        os.close(high)


async def test_the_watcher_of_a_child_goes_with_it_and_holds_none_of_its_files(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, "parent_death")
    process = launch("plain")
    await process.start(30)
    (watcher,) = _children(process.pid)
    held = [os.readlink(f"/proc/{watcher}/fd/{fd}") for fd in os.listdir(f"/proc/{watcher}/fd")]
    assert [name.partition(":")[0] for name in held] == ["pipe"], held
    assert await process.stop(30) == 0
    await eventually(lambda: not alive(watcher))


async def test_a_capability_that_does_not_exist_is_one_line_and_code_2(launch: Launch) -> None:
    process = launch("plain", env={capabilities.VARIABLE: "memfd,eventfd"})
    wrong = r"code 2; .*\nservice\.py: PDMESH_WITHOUT: 'eventfd' is no capability; give some of .*, or all$"
    with pytest.raises(StartFailed, match=wrong):
        await process.start(30)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _handles_sigterm(pid: int) -> bool:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("path", "shown"), [("/src/router/__main__.py", "router"), ("/bin/pdmesh", "pdmesh"), ("/src/service.py", "service.py")]
)
def test_a_wrong_setting_is_reported_under_the_programs_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, shown: str
) -> None:
    async def wrong(_: Lifecycle) -> None:
        raise ConfigError("--port", "is wrong")

    monkeypatch.setattr("sys.argv", [path])
    assert run(wrong) == EXIT_USAGE
    assert capsys.readouterr().err == f"{shown}: --port: is wrong\n"


ENDING = """
import atexit, concurrent.futures, sys, threading, time
from pdmesh.runtime.process import end

class Held:
    def __del__(self):
        print("taken down")

def later(text):
    time.sleep(0.2)
    print(text)

held = Held()
atexit.register(print, "registered")
threading.Thread(target=later, args=["thread"]).start()
concurrent.futures.ThreadPoolExecutor().submit(later, "pool's thread")
print("unflushed")
end(7)
"""


def test_a_process_ends_as_by_the_interpreter_but_takes_nothing_down() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
    *threads, last = done.stdout.splitlines()
    assert (sorted(threads), last) == (["pool's thread", "thread", "unflushed"], "registered")


def test_a_process_without_streams_ends_too() -> None:
    program = "import sys; sys.stdout = None; sys.stderr.close(); from pdmesh.runtime.process import end; end(5)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 5
