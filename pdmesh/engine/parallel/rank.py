"""The process of a rank other than 0: `python -m pdmesh.engine.parallel.rank FD PARENT_PID`, started by `tp_group.py`.

It lives as long as rank 0's process: it is killed with that one (pdmesh.platform.parent_death), and a closed socket ends it.
Signals that ask to stop are for rank 0, which drains first: a terminal's Ctrl-C reaches both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback

from pdmesh.platform import parent_death


def main(fd: int, parent_pid: int) -> None:
    """Run until rank 0 is gone. Never returns: torch's clean-up at exit may wait for peers."""
    parent_death.exit_with_parent(parent_pid)
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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
