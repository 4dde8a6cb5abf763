"""A process that was forked (tests/support/forked_processes.py) is to its parent, and in itself, one that was started."""

import os
import signal
from pathlib import Path

import pytest

from pdmesh.runtime.child import ManagedProcess, StartFailed, import_path, python_command

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="forks on Linux alone")


def router(*flags: str, **env: str) -> ManagedProcess:
    command = python_command("-m", "router", "--port", "0", "--host", "127.0.0.1", *flags)
    return ManagedProcess("router", command, env={**import_path(), **env})


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def test_its_end_and_what_it_writes_reach_its_parent() -> None:
    """Arguments and environment are its own."""
    with pytest.raises(StartFailed, match=r"ended with code 2(.|\n)*--no-such-flag"):
        await router("--no-such-flag").start(60)
    with pytest.raises(StartFailed, match=r"ended with code 2(.|\n)*PDMESH_HTTP_PORT"):
        await router(PDMESH_HTTP_PORT="many").start(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_it_is_a_child_in_a_session_of_its_own(number: signal.Signals, tmp_path: Path, tiny: Path) -> None:
    process = router("--models", f"tiny={tiny}", "--workers", "127.0.0.1:1")
    await process.start(60)
    _, parent, _, session, *_ = stat(process.pid)
    assert (int(parent), int(session)) == (os.getpid(), process.pid)
    assert "tests.support.forked_processes" in command_of(process.pid)
    process.signal(number)
    assert await process.wait() == (-signal.SIGKILL if number == signal.SIGKILL else 0)
