"""The default number of threads: as many as there are cores that this process may really use."""

from __future__ import annotations

from pathlib import Path

import torch

from pdmesh.platform.fallbacks import CGROUP, cores_to_share


def default_threads(cgroup: Path = CGROUP) -> int:
    """Return physical cores (torch counts them), less those that affinity or a container's processor quota exclude: threads
    beyond a quota would wait at every barrier for one that the system holds back."""
    return max(1, min(torch.get_num_threads(), len(cores_to_share(cgroup))))
