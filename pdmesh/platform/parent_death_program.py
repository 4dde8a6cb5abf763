"""Becomes a command that ends with its parent: `python parent_death_program.py PARENT_PID FD COMMAND...`.

It replaces `preexec_fn`, which is not safe in a process with threads. It runs without site packages, so it imports the standard
library only. FD "-": the kernel ends the command, by a setting that survives exec. Otherwise FD is the reading end of a pipe,
whose writing end only the parent has, and a forked process waits for the pipe's end:

    parent ── pipe ──► watcher (child of COMMAND): kills COMMAND when the pipe ends, ends when COMMAND has ended
       └── starts ──► this process, which becomes COMMAND and keeps its process id
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
KERNEL = "-"
POLL_PERIOD_S = 0.2  # between two looks of a watcher whether its command has ended


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send a signal to this process when its parent ends. Raises OSError, AttributeError (not Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def start_watcher(lifeline: int) -> None:
    """Fork a process that kills this one when the pipe `lifeline` ends. It holds none of this process's other files."""
    watched = os.getpid()
    if os.fork():
        os.close(lifeline)
        return
    try:
        _keep_only(lifeline)
        _watch(lifeline, watched)
    finally:
        os._exit(0)


def _keep_only(fd: int) -> None:
    """Close all other files: whoever reads the command's output must see its end when the command ends."""
    last = os.sysconf("SC_OPEN_MAX")
    os.closerange(0, fd)
    os.closerange(fd + 1, last if 0 < last < 1 << 16 else 1 << 16)


def _watch(lifeline: int, watched: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to a group, they are for the command
        signal.signal(number, signal.SIG_IGN)
    ended = select.poll()  # select() would know the first 1 024 descriptors alone
    ended.register(lifeline, select.POLLIN)
    while os.getppid() == watched:
        if ended.poll(round(1000 * POLL_PERIOD_S)):
            if os.getppid() == watched:  # else its id may be another process's by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(watched, signal.SIGKILL)
            return


def _main(parent_pid: str, fd: str, *argv: str) -> None:
    if fd == KERNEL:
        set_parent_death_signal(signal.SIGKILL)
    else:
        start_watcher(int(fd))
    if os.getppid() != int(parent_pid):  # it ended before the kernel knew the setting
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from None


if __name__ == "__main__":
    _main(*sys.argv[1:])
