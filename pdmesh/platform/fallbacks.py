"""Questions that every system answers: by a capability, or by what is known without it."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from pdmesh.platform import linux, processor
from pdmesh.platform.capabilities import AFFINITY, CGROUPS, PROC

CPUINFO, MEMINFO, CGROUP = Path("/proc/cpuinfo"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")
NO_LIMIT = 2**62
"""Bytes that a control group without a limit leaves."""
_FOLDERS = ((Path("/proc"), PROC), (CGROUP, CGROUPS))


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


def quota_cores(cgroup: Path = CGROUP) -> int | None:
    """Return whole cores of the control group's quota (version 2, else 1), at least 1; None without a quota."""
    try:
        both = text(cgroup / "cpu.max")
        if both is not None:
            quota, period = both.split()
        else:
            quota, period = (text(cgroup / "cpu" / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        return None if quota == "max" or int(quota) < 0 else max(1, int(quota) // int(period))
    except ValueError:
        return None


def cores_to_share(cgroup: Path = CGROUP) -> list[int]:
    """Return the cores for which there should be threads that compute: those that this thread may run on, and of these no more
    than a quota allows, beyond which threads would wait for each other's turns."""
    cores = usable_cores()
    return cores[: quota_cores(cgroup)]


def process_cores() -> list[int]:
    """Return the numbers of the cores that the process's main thread may run on, ascending, to which others of its threads may be
    bound. All of them where the system does not say."""
    return sorted(linux.allowed_cores(os.getpid())) if AFFINITY.is_there else list(range(os.cpu_count() or 1))


def physical_bytes() -> int:
    """Return the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes that can still be allocated: the machine's, or the container's where that is less. Pages of files count as
    free, since the system drops them for others. Where it does not report what is free (not Linux), all physical memory."""
    content = text(meminfo)
    machine = physical_bytes() if content is None else _available_bytes(content)
    return min(machine, _limit_left(cgroup))


def _available_bytes(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no MemAvailable; give kv_memory_mb or num_blocks")


def _limit_left(folder: Path) -> int:
    """Return what the control group's limit leaves, as a container sees its own: version 2, else 1."""
    files = {
        "memory.max": ("memory.current", "memory.stat", ""),
        "memory/memory.limit_in_bytes": ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
    }
    return min(_left_by(folder, limit, *names) for limit, names in files.items())


def _left_by(folder: Path, limit_name: str, used_name: str, stat_name: str, prefix: str) -> int:
    try:
        limit, used_text, stat_text = (text(folder / name) or "" for name in (limit_name, used_name, stat_name))
        used = int(used_text)
        stat = dict(line.split() for line in stat_text.splitlines())
    except ValueError:
        return NO_LIMIT
    # Pages of files count as used, those that were used twice (active) too, and are given up on demand.
    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return NO_LIMIT if limit.strip() == "max" else max(int(limit) - used + cached, 0)


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
