"""Ends a child with its parent, also when the parent is killed with SIGKILL or the child is stopped.

On Linux the kernel does it (PR_SET_PDEATHSIG with SIGKILL, the only signal that also ends a stopped process). It fires when the
parent's *thread* that started the child ends, so start children from a thread that lives as long as they should, such as the main
thread's event loop. Elsewhere a process of its own watches over a command, by a pipe that ends with the parent; a program that
asks for it itself (`exit_with_parent`) has a thread that looks for its parent, which does not run in a stopped program.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.platform import linux, parent_death_program
from pdmesh.platform.capabilities import PARENT_DEATH

POLL_PERIOD_S = 0.5


@dataclass(frozen=True)
class TiedCommand:
    """Hold a command line, and the descriptors that its process inherits (`pass_fds` of subprocess)."""

    argv: tuple[str, ...]
    pass_fds: tuple[int, ...]


def exit_with_parent(parent_pid: int | None = None) -> None:
    """End this process when its parent ends. `parent_pid` is the expected parent; None: the current one."""
    expected = os.getppid() if parent_pid is None else parent_pid
    if PARENT_DEATH.is_there:
        linux.set_parent_death_signal()
    else:
        threading.Thread(target=_watch_parent, args=(expected,), name="parent watch", daemon=True).start()
    if os.getppid() != expected:  # the parent died before the kernel knew the setting
        os.kill(os.getpid(), signal.SIGKILL)


def tied(argv: Sequence[str]) -> TiedCommand:
    """Return the command that runs `argv` as a child that dies with the calling process."""
    program = (sys.executable, "-I", "-S", os.path.abspath(parent_death_program.__file__), str(os.getpid()))
    if PARENT_DEATH.is_there:
        return TiedCommand((*program, parent_death_program.KERNEL, *argv), ())
    lifeline = _lifeline(os.getpid())
    return TiedCommand((*program, str(lifeline), *argv), (lifeline,))


@functools.cache
def _lifeline(_pid: int) -> int:
    """Return the reading end of this process's pipe: its writing end stays open until the process ends, and no child inherits it.
    A forked process has its own."""
    reading, _ = os.pipe()
    return reading


def _watch_parent(expected: int) -> None:
    while os.getppid() == expected:
        time.sleep(POLL_PERIOD_S)
    os.kill(os.getpid(), signal.SIGKILL)
