"""Memory in large pages, where the system has them: streaming then misses the address cache 512 times less often."""

from __future__ import annotations

import contextlib
import mmap


def private_memory(num_bytes: int) -> mmap.mmap:
    """`num_bytes` zero bytes of this process alone: large pages of shared memory are another setting, mostly off."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: ordinary pages serve as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
