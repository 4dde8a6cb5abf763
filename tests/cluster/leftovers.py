"""What a cluster may leave behind: processes, in whatever namespace, and shared memory. None of it may."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

MARK = "TEST_CLUSTER"
"""A variable of every process of a cluster, the containers' included; its value is the cluster's folder."""
_END_S = 15.0
_POLL_S = 0.2


class Footprint:
    """Marks this process, and so all that it starts."""

    def __init__(self, folder: Path) -> None:
        os.environ[MARK] = str(folder)
        self._mark = f"{MARK}={folder}\0".encode()
        self._memory = _shared_memory()

    def assert_gone(self) -> None:
        """Processes and segments are gone, or go in time."""
        deadline = time.monotonic() + _END_S
        while left := [*self.processes(), *sorted(_shared_memory() - self._memory)]:
            assert time.monotonic() < deadline, f"left behind: {', '.join(left)}"
            time.sleep(_POLL_S)

    def processes(self) -> list[str]:
        """All marked ones but this."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if self._mark in (entry / "environ").read_bytes():
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found.append(f"process {entry.name} ({command[:80]})")
        return found


def _shared_memory() -> set[str]:
    return {f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir() if "pdmesh" in entry.name}
