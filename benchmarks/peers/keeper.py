"""Runs a command and leaves nothing of it behind: `python keeper.py COMMAND...`, as the leader of a session of its own.

Engines of others are processes of their own that outlive a front end that was killed. So when this process is asked to end
(SIGTERM), when its parent ends, or when the command does, the command gets a moment, then the rest of its process group is
killed; Python's resource trackers last, which remove from shared memory what the killed ones left there.
Imports the standard library only: it runs as a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1  # prctl(2)
GRACE_S, _REST_S, _TRACKERS_S = 15.0, 2.0, 3.0
ALL_S = GRACE_S + _REST_S + _TRACKERS_S


class _Asked(Exception):
    """Somebody wants the command to end."""


def _ask(number: int, frame: FrameType | None) -> None:
    raise _Asked


def main() -> None:
    signal.signal(signal.SIGTERM, _ask)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(sys.argv[1:])
        process.wait()
    except _Asked:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if process is not None:
            _end(process)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _wait_until_gone(_REST_S, trackers=False)
        for pid in _others(trackers=False):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _wait_until_gone(_TRACKERS_S, trackers=True)
        os.killpg(0, signal.SIGKILL)  # this process, too


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _wait_until_gone(timeout_s: float, *, trackers: bool) -> None:
    deadline = time.monotonic() + timeout_s
    while _others(trackers=trackers) and time.monotonic() < deadline:
        time.sleep(0.1)


def _others(*, trackers: bool) -> list[int]:
    """Processes of this group but this one, with or without resource trackers; none where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid, (state, _, group) = int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == os.getpgrp() and pid != os.getpid() and state not in "ZX":
                is_tracker = b"resource_tracker" in (entry / "cmdline").read_bytes()
                found += [pid] if trackers or not is_tracker else []
    return found


if __name__ == "__main__":
    main()
