"""Anonymous memory of the host that several processes map, and that only those write to who mapped it before it was sealed."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable

# linux/fcntl.h; Python's fcntl module names F_SEAL_FUTURE_WRITE only from 3.13 on.
_F_SEAL_FUTURE_WRITE = 0x0010


def sealed_memory(name: str, num_bytes: int, before_seal: Callable[[int], None] | None = None) -> tuple[mmap.mmap, int]:
    """Our mapping, and the descriptor, which is the caller's to close. `before_seal` gets that one while it can still be mapped
    for writing. `name`: as /proc shows it. On Linux alone."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if before_seal is not None:
            before_seal(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return mapping, fd
