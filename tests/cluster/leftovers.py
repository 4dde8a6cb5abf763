"""What a cluster may leave behind: processes in its network, and shared memory. None of it may."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_END_S = 15.0
_POLL_S = 0.2


class Footprint:
    """As it is in this process's network when it is made."""

    def __init__(self) -> None:
        self._memory = _shared_memory()
        self._before = set(_processes())

    def assert_gone(self) -> None:
        """All processes that descend from this one or live in its network, and all segments, are gone, or go in time."""
        deadline = time.monotonic() + _END_S
        while left := self._left():
            assert time.monotonic() < deadline, f"left behind: {', '.join(left)}"
            time.sleep(_POLL_S)

    def _left(self) -> list[str]:
        new = [pid for pid in _processes() if pid not in self._before]
        return [f"process {pid} ({_command(pid)})" for pid in new] + sorted(_shared_memory() - self._memory)


def _processes() -> list[int]:
    """Of this network, and of those of its pods: whoever descends from this process, whatever its parent is now."""
    own = os.stat("/proc/self/ns/mnt").st_ino
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            # A container's mounts are its own: what it was started with tells it.
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns/mnt").st_ino == own or b"tests.cluster" in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    return "?"


def _shared_memory() -> set[str]:
    return {f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir() if entry.name.startswith("pdmesh")}
