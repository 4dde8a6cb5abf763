"""A file mapped in huge pages, where its file system keeps it in such pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from pathlib import Path

from pdmesh.platform import fallbacks, linux

HUGE_PAGE = 2 * 2**20  # bytes
_PIECE = 8 * HUGE_PAGE
_ENOUGH = 0.5  # share of a mapping in huge pages
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EAGAIN, errno.ENOMEM, errno.EBUSY)


def map_file(fd: int, num_bytes: int) -> tuple[memoryview, bool]:
    """Map the first `num_bytes` of a file read-only, from the address of a huge page on, and read them in.

    Returns the mapping, which lasts as long as a view of it, and whether at least half of it is in huge pages. The view counts as
    writable, but the process that writes to it ends. Raises OSError: the system cannot, or the file cannot be read.
    """
    # Anonymous memory reserves the addresses, and frees them with the file's pages: the kernel by itself does not choose the
    # address of a huge page everywhere.
    reserved = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | linux.RESERVE_NOTHING)
    first = _address(reserved)
    address = first + -first % HUGE_PAGE
    linux.map_file_at(address, num_bytes, fd)
    _where_possible(linux.use_huge_file_pages, address, num_bytes)
    for start in range(0, num_bytes, _PIECE):  # in pieces: signals are handled between them
        _where_possible(linux.read_pages, address + start, min(_PIECE, num_bytes - start))
    if not (is_huge := _huge_bytes(address, num_bytes) >= _ENOUGH * num_bytes):
        _where_possible(linux.collapse_pages, address, num_bytes)
        is_huge = _huge_bytes(address, num_bytes) >= _ENOUGH * num_bytes
    return memoryview(reserved)[address - first : address - first + num_bytes], is_huge


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _where_possible(advise: Callable[[int, int], None], address: int, num_bytes: int) -> None:
    """Advise, where this kernel knows how and this file allows it."""
    try:
        advise(address, num_bytes)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise


def _huge_bytes(address: int, num_bytes: int) -> int:
    """Return how many bytes of a mapped file are in huge pages; 0 where the system does not say."""
    found, is_inside = 0, False
    for line in (fallbacks.text(Path("/proc/self/smaps")) or "").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            is_inside = address <= int(name.partition("-")[0], 16) < address + num_bytes
        elif is_inside and name in ("FilePmdMapped:", "ShmemPmdMapped:"):
            found += int(rest.split()[0]) << 10
    return found
