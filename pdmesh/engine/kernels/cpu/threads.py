"""The default number of threads: as many as there are cores that this process may really use."""

from __future__ import annotations

from pathlib import Path

import torch

from pdmesh.platform.fallbacks import text, usable_cores

_CGROUP = Path("/sys/fs/cgroup")


def default_threads(cgroup: Path = _CGROUP) -> int:
    """Return physical cores (torch counts them), less those that affinity or a container's processor quota exclude: threads
    beyond a quota would wait at every barrier for one that the system holds back."""
    allowed = len(usable_cores())
    return max(1, min(torch.get_num_threads(), allowed, quota_cores(cgroup) or allowed))


def quota_cores(cgroup: Path = _CGROUP) -> int | None:
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
