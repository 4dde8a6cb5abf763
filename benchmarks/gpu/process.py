"""A part's process: ended with its children when its time is over, whatever state the GPU is in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

GRACE_S = 3.0
NOT_EQUAL = 4
"""Exit status of a part that found something that was not equal: 1 is Python's for an error that nobody caught."""


class PartProcess:
    """In a session of its own, so that what it started (a mesh) goes with it."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv

    def run(self, seconds: float) -> str:
        """What became of it: `done`, or how it ended. It gets SIGTERM after so long, and SIGKILL soon after."""
        process = subprocess.Popen(self._argv, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"cut off after {seconds:.0f} s"
        finally:
            _end(process)
        return _words(status)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its whole session; a second signal for who does not mind the first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _words(status: int) -> str:
    if status == 0:
        return "done"
    if status < 0:
        return f"ended by signal {-status}"
    return "something was not equal" if status == NOT_EQUAL else f"failed with status {status}; its output says why"
