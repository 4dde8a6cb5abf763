"""Failpoints do what their variable says, at the hit that it names."""

from __future__ import annotations

import asyncio
import errno
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh.runtime import failpoints
from pdmesh.runtime.failpoints import FailpointError, hit, hit_async


@pytest.fixture(autouse=True)
def no_failpoints_left() -> Iterator[None]:
    yield
    failpoints.watch(None)
    failpoints.install("")


def test_nothing_happens_when_unset() -> None:
    failpoints.install("")
    hit("push.part")


def test_an_error_at_every_hit_of_its_name_only() -> None:
    failpoints.install("push.part=error")
    hit("push.hello")
    for _ in range(2):
        with pytest.raises(FailpointError, match=r"push\.part"):
            hit("push.part")


def test_only_the_nth_hit() -> None:
    failpoints.install("push.part=error@2, push.part=error@4")
    raised = []
    for _ in range(5):
        try:
            hit("push.part")
            raised.append(False)
        except FailpointError:
            raised.append(True)
    assert raised == [False, True, False, True, False]


def test_a_delay_blocks() -> None:
    failpoints.install("a=delay:30")
    started = time.monotonic()
    hit("a")
    assert time.monotonic() - started >= 0.03


async def test_an_async_delay_lets_others_run() -> None:
    failpoints.install("a=delay:30")
    ran = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, ran.set)
    await hit_async("a")
    assert ran.is_set()


@pytest.mark.parametrize("text", ["a", "a=", "a=explode", "a=delay", "a=delay:x", "a=error@0", "a=error@x", "A b=error"])
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="PDMESH_FAILPOINTS: cannot read "):
        failpoints.install(text)


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("pause", None)])
def test_kill_and_pause_in_a_process_of_its_own(action: str, code: int | None) -> None:
    program = "from pdmesh.runtime.failpoints import hit; hit('b'); print('before', flush=True); hit('a'); print('after')"
    env = {"PDMESH_FAILPOINTS": f"a={action}", "PYTHONPATH": "."}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"before\n"
        if code is None:
            _wait_until_stopped(process.pid)
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == b"after\n"
        assert process.wait(10) == (code or 0)


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            if stat.read().split()[2] == "T":
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_room_left() -> None:
    failpoints.install("shm.map=full")
    with pytest.raises(OSError, match=r"shm\.map") as raised:
        hit("shm.map")
    assert raised.value.errno == errno.ENOSPC


def test_a_file_arms_and_disarms_while_the_process_runs(tmp_path: Path) -> None:
    file = tmp_path / "failpoints"
    failpoints.watch(file)
    hit("a")
    _write(file, "a=error@2")
    hit("a")
    with pytest.raises(FailpointError):
        hit("a")
    _write(file, "b=error")
    hit("a")
    with pytest.raises(FailpointError):
        hit("b")
    file.unlink()
    hit("b")
    assert Path(f"{file}.hit").read_text() == "a\nb\n"


def _write(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)
