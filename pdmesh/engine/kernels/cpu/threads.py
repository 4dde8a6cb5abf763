"""The default number of threads: as many as there are cores that this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def default_threads(cgroup: Path = _CGROUP) -> int:
    """Return physical cores (torch counts them), less those that affinity or a container's processor quota exclude: threads
    beyond a quota would wait at every barrier for one that the system holds back."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), allowed, quota_cores(cgroup) or allowed))


def quota_cores(cgroup: Path = _CGROUP) -> int | None:
    """Return whole cores of the control group's quota (version 2, else 1), at least 1; None without a quota."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if quota == "max" or int(quota) < 0 else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
