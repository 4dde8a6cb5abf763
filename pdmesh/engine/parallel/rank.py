"""The process of a rank other than 0: `python -m pdmesh.engine.parallel.rank FD PARENT_PID`, started by `tp_group.py`.

It lives as long as rank 0's process: the kernel kills it with that one (on Linux, also when either is stopped or killed), and a
closed socket ends it everywhere. Signals that ask to stop are for rank 0, which drains first: a terminal's Ctrl-C reaches both.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import traceback

_PR_SET_PDEATHSIG = 1


def main(fd: int, parent_pid: int) -> None:
    """Run until rank 0 is gone. Never returns: torch's clean-up at exit may wait for peers."""
    _end_with(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from pdmesh.engine.parallel import tp_protocol  # takes a second: only now, when the process ends with its parent
    from pdmesh.engine.parallel.tp_worker import follow

    sock, code = socket.socket(fileno=fd), 0
    try:
        follow(sock)
    except EOFError:
        pass  # rank 0 has closed its end, as expected
    except BaseException as error:  # noqa: BLE001  reported to rank 0, and then the process ends
        traceback.print_exc()
        code = 1
        with contextlib.suppress(OSError):
            tp_protocol.send(sock, tp_protocol.Kind.FAILED, f"{type(error).__name__}: {error}".encode())
    sys.stderr.flush()
    os._exit(code)


def _end_with(parent_pid: int) -> None:
    """Have the kernel end this process with its parent, like pdmesh/runtime/parent_death.py, which the engine may not import."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
