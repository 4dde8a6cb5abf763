"""Ends a child with its parent, also when the parent is killed with SIGKILL or the child is stopped.

On Linux the kernel does it (PR_SET_PDEATHSIG with SIGKILL, the only signal that also ends a stopped process). It fires when the
parent's *thread* that started the child ends, so start children from a thread that lives as long as they should, such as the main
thread's event loop. Elsewhere a thread of the child watches its parent.

As a program, `python parent_death.py PARENT_PID COMMAND...` arms itself and becomes COMMAND: the setting survives exec. It
replaces `preexec_fn`, which is not safe in a process with threads. It imports the standard library only and must stay so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
POLL_PERIOD_S = 0.5


def exit_with_parent(parent_pid: int | None = None) -> None:
    """End this process when its parent ends. `parent_pid` is the expected parent; None: the current one."""
    expected = os.getppid() if parent_pid is None else parent_pid
    if sys.platform == "linux":
        _set_parent_death_signal()
    else:
        threading.Thread(target=_watch_parent, args=(expected,), name="parent watch", daemon=True).start()
    if os.getppid() != expected:  # the parent died before the kernel knew the setting
        os.kill(os.getpid(), signal.SIGKILL)


def command(argv: Sequence[str]) -> list[str]:
    """Return the command line that runs `argv` as a child that dies with the calling process."""
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *argv]


def _set_parent_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def _watch_parent(expected: int) -> None:
    while os.getppid() == expected:
        time.sleep(POLL_PERIOD_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _main(parent_pid: str, *argv: str) -> None:
    exit_with_parent(int(parent_pid))
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from None


if __name__ == "__main__":
    _main(*sys.argv[1:])
