"""Questions that every system answers: by a capability, or by what is known without it."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from pdmesh.platform import linux, processor
from pdmesh.platform.capabilities import AFFINITY, CGROUPS, PROC

CPUINFO = Path("/proc/cpuinfo")
_FOLDERS = ((Path("/proc"), PROC), (Path("/sys/fs/cgroup"), CGROUPS))


def text(path: Path) -> str | None:
    """Return the content of a file of the kernel's; None where it does not exist or cannot be read, and beneath /proc and
    /sys/fs/cgroup where these are taken away."""
    if any(path.is_relative_to(folder) and capability.is_taken for folder, capability in _FOLDERS):
        return None
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def processor_features(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the names of the instructions that this processor has, as Linux names them; none where the system does not say."""
    return processor.listed(text(cpuinfo) or "") if cpuinfo.exists() else processor.asked()


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this thread may run on, ascending; all of them where the system does not say."""
    return sorted(linux.allowed_cores()) if AFFINITY.is_there else list(range(os.cpu_count() or 1))


def process_cores() -> list[int]:
    """Return the numbers of the cores that the process's main thread may run on, ascending, to which others of its threads may be
    bound. All of them where the system does not say."""
    return sorted(linux.allowed_cores(os.getpid())) if AFFINITY.is_there else list(range(os.cpu_count() or 1))


def physical_bytes() -> int:
    """Return the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def unlinked_file(num_bytes: int) -> int:
    """Return the descriptor of `num_bytes` zero bytes in a file without a name, which no other user can open: it is gone with its
    last descriptor and mapping. It has no seals, so map it only in processes that trust each other: one that shrinks it ends the
    others."""
    with tempfile.TemporaryFile(prefix="pdmesh-", buffering=0) as file:
        file.truncate(num_bytes)
        return os.dup(file.fileno())


def receive_fds(sock: socket.socket, num_bytes: int, max_fds: int) -> tuple[bytes, list[int], int]:
    """Return bytes, descriptors that no child inherits, and flags of one message on a Unix socket (see socket.recv_fds)."""
    data, fds, flags, _ = socket.recv_fds(sock, num_bytes, max_fds, linux.CLOSE_RECEIVED_ON_EXEC)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds, flags
