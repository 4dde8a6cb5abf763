"""`pdmesh up` on a machine that has nothing of what only some systems have: it answers, and ends as a whole."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from pdmesh.platform.capabilities import ALL, VARIABLE
from pdmesh.runtime.child import import_path, python_command
from tests.mesh.checks import shared_memory_names
from tests.support.up_command import UpCommand

PROGRAM = tuple(python_command("-m", "pdmesh"))

pytestmark = [
    pytest.mark.timeout(400),  # the portable kernels are compiled once
    pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc"),
]


def up(tmp_path: Path, *arguments: str) -> UpCommand:
    environment = {**os.environ, **import_path(), VARIABLE: ALL}
    return UpCommand(PROGRAM, cwd=tmp_path, folder=tmp_path, env=environment, arguments=arguments)


def is_worker(pid: int) -> bool:
    """Whether it is the decode worker, not what watches over it: that one keeps the command that it began with."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"decode-0" in command and b"-I" not in command


@pytest.mark.real_model
def test_it_answers_and_leaves_nothing(tmp_path: Path) -> None:
    segments = shared_memory_names()
    with up(tmp_path) as mesh:
        mesh.wait_listening()
        answer = mesh.answer("What is the capital of France?")
        assert "Paris" in answer
        assert len(mesh.pids()) >= 9  # launcher, Redis, router and two workers, and what watches over each
        mesh.wait_ready()
        assert mesh.end(signal.SIGINT) == 0
        assert mesh.leftovers() == []
    assert not [name for name in shared_memory_names() - segments if "pdmesh" in name]


def test_its_processes_end_with_a_launcher_that_is_killed(tmp_path: Path, tiny: Path) -> None:
    """One of them is paused."""
    with up(tmp_path, "--model", str(tiny)) as mesh:
        mesh.wait_listening()
        pids = mesh.pids()
        assert len(pids) >= 9
        paused = next(pid for pid in pids if is_worker(pid))
        os.kill(paused, signal.SIGSTOP)
        assert mesh.end(signal.SIGKILL) == -signal.SIGKILL
        assert [left for left in mesh.leftovers() if left.startswith("process")] == []
