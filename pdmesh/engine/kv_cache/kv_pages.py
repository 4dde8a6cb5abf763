"""The pool's pages are there before anybody writes to them.

Memory that the system has promised becomes memory when it is first touched, page by page, zeroed: up to milliseconds for each, in
all layers at once, on the path of a prefill or a hand-off. So the pages of the lowest blocks are touched at start, and those of
the next ones by a thread as soon as use comes near: block ids are first given out in order. What is never needed is never taken.

    block ids    0 ········ in use ········│···· touched ····│····· promised ·····
                                    reach() ┘                 └ _end
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading

STRIPE_BYTES = 128 << 20  # touched at once, of all layers together
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h: touches pages and changes nothing in them


class TouchedPages:
    """Of a pool of `num_planes` planes (keys or values of a layer) of `num_blocks` blocks at `address`."""

    def __init__(self, address: int, num_planes: int, num_blocks: int, block_bytes: int) -> None:
        self._address = address
        self._num_planes, self._num_blocks, self._block_bytes = num_planes, num_blocks, block_bytes
        self._stripe = max(1, STRIPE_BYTES // (num_planes * block_bytes))
        self._end = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._touch_next()

    @property
    def num_blocks(self) -> int:
        """From block 0 on; or all, where the system cannot be asked."""
        return self._end

    def reach(self, block_id: int) -> None:
        """`block_id` is in use. To be called by one thread."""
        if block_id + self._stripe // 2 < self._end or self._end >= self._num_blocks:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._touch_next, name="kv-pages", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Before the memory is given back."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _touch_next(self) -> None:
        start, end = self._end, min(self._end + self._stripe, self._num_blocks)
        for plane in range(self._num_planes):
            first = plane * self._num_blocks
            if self._closed or not _touch(
                self._address + (first + start) * self._block_bytes, self._address + (first + end) * self._block_bytes
            ):
                end = self._num_blocks
                break
        self._end = end


def _touch(start: int, end: int) -> bool:
    """The pages of [start, end); False where the system cannot (Linux before 5.14, others): they then come when they are used."""
    if sys.platform != "linux":
        return False
    start -= start % mmap.PAGESIZE
    # ctypes gives up Python's lock for the call.
    result: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_WRITE)
    return result == 0
