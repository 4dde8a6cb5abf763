"""The empty file that workers of a local mesh make their table of cores in (pdmesh/engine/kernels/cpu/core_table.py)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pdmesh.platform import linux
from pdmesh.platform.capabilities import MEMFD, PROC


@dataclass
class SharedFile:
    """A file that other processes of this user open by its path while it is not closed.

    In memory and without a name, where the system has that: then nothing is left of it however this process ends.
    """

    path: str
    _fd: int  # -1: it has a name

    @classmethod
    def make(cls, name: str, folder: Path) -> Self:
        """Return an empty file; where it has to have a name, one in `folder` that begins with `name`."""
        if MEMFD.is_there and PROC.is_there:
            fd = linux.memfd(f"pdmesh-{name}", 0)
            return cls(f"/proc/{os.getpid()}/fd/{fd}", fd)
        fd, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
        os.close(fd)
        return cls(path, -1)

    def close(self) -> None:
        """Give it up; processes that have mapped it keep it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        else:
            with contextlib.suppress(OSError):
                Path(self.path).unlink(missing_ok=True)
