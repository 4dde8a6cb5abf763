"""The KV pool: one tensor for all layers' keys and values, in memory that peers can map but not change.

    tensor [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]        keys = [:, 0], values = [:, 1]

On the CPU a shared pool is a memfd: anonymous shared memory without a name, which is freed when its last mapping and descriptor
are closed, however the process ends. Our own writable mapping is made first; then the file is sealed, so that a peer that is
given the descriptor can only map it read-only and can neither shrink nor grow it. A pool that is not shared is private memory.

Where the system has no such memory, no peer gets a descriptor: of a file that it could shrink, our next step would die (SIGBUS).
Workers then exchange KV over sockets. Only the ranks of one worker, which trust each other, share an unlinked file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.platform import fallbacks, linux
from pdmesh.platform.capabilities import HUGE_PAGES, MEMFD, TOUCHED_PAGES

# Prefault: the pool's pages are touched before they are needed
#
# The system allocates memory when it is first touched, page by page, zeroed: up to milliseconds for each,
# in all layers at once, on the path of a prefill or a hand-off. So the pages of the lowest blocks are touched at start, and
# those of the next ones by a thread as soon as use comes near: block ids are first given out in order. Unused pages are
# never allocated. The thread takes a share of a core, in pieces of less than a step: threads of a step wait for each other, so
# one core that is taken for long holds up all of them.
#
#     block ids    0 ········ in use ········│···· touched ····│···· untouched ····
#                                     reach() ┘                 └ _end


STRIPE_BYTES = 128 << 20  # touched ahead, of all layers together
PIECE_BYTES = 1 << 20
"""Touched without a pause by the thread: half a millisecond, or less."""
SHARE = 0.2
"""Part of the time that the thread touches pages, at most."""


class TouchedPages:
    """Touch pages of a pool of `num_planes` planes (keys or values of a layer) of `num_blocks` blocks at `address`."""

    def __init__(self, address: int, num_planes: int, num_blocks: int, block_bytes: int) -> None:
        self._address = address
        self._num_planes, self._num_blocks, self._block_bytes = num_planes, num_blocks, block_bytes
        self._stripe = max(1, STRIPE_BYTES // (num_planes * block_bytes))
        self._end = self._reached = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._touch_next(STRIPE_BYTES, 1.0)

    @property
    def num_blocks(self) -> int:
        """Return the touched blocks, from block 0 on; all of them where the system cannot touch pages ahead."""
        return self._end

    def reach(self, block_id: int) -> None:
        """Record that `block_id` is in use. One thread at a time calls it."""
        self._reached = max(self._reached, block_id)
        if block_id + self._stripe // 2 < self._end or self._end >= self._num_blocks:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._touch_next, args=(PIECE_BYTES, SHARE), name="kv-pages", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop touching, before the memory is freed."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _touch_next(self, piece_bytes: int, share: float) -> None:
        """Touch the next blocks, `piece_bytes` at a time, and for at most this share of the time."""
        start, end = self._end, min(self._end + self._stripe, self._num_blocks)
        for plane in range(self._num_planes):
            first = self._address + (plane * self._num_blocks + start) * self._block_bytes
            last = first + (end - start) * self._block_bytes
            for piece in range(first, last, piece_bytes):
                began = time.perf_counter()
                if not _touch(piece, min(piece + piece_bytes, last)):
                    self._end = self._num_blocks
                    return
                is_late = self._reached > start - self._stripe // 8  # a hand-off, say, is nearly here: no time for pauses
                pause_s = 0.0 if share == 1 or is_late else (time.perf_counter() - began) * (1 / share - 1)
                if self._closed.wait(pause_s):
                    return
        self._end = end


def _touch(start: int, end: int) -> bool:
    """Touch the pages of [start, end); False where the system cannot (Linux before 5.14, others): they are then touched by
    use."""
    if not TOUCHED_PAGES.is_there:
        return False
    try:
        linux.touch_pages(start - start % mmap.PAGESIZE, end)
    except OSError:
        return False
    return True


# Huge pages, where the system has them: streaming then misses the TLB 512 times less often


def private_memory(num_bytes: int) -> mmap.mmap:
    """Return `num_bytes` zero bytes of this process alone: huge pages of shared memory are another setting, mostly off."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE_PAGES.is_there:
        with contextlib.suppress(OSError):  # ordinary pages serve as well
            linux.use_huge_pages(memory)
    return memory


# Anonymous memory (memfd) that several processes map; only those that mapped it before it was sealed can write to it


def shared_memory(name: str, num_bytes: int, before_seal: Callable[[int], None] | None = None) -> tuple[mmap.mmap, int | None]:
    """Return our mapping, and the descriptor that peers may have, which the caller closes; None where memory cannot be sealed.
    `before_seal` gets a descriptor while it can still be mapped for writing. `name` is shown by /proc."""
    if not MEMFD.is_there and before_seal is None:
        return private_memory(num_bytes), None  # only peers would map it
    if MEMFD.is_there:
        # A mapping that Python makes of a descriptor keeps a copy of it, and with it memory that was to be replaced.
        reserved = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | linux.RESERVE_NOTHING)
        return reserved, _sealed_at(address_of(reserved), name, num_bytes, before_seal)
    fd = fallbacks.unlinked_file(num_bytes)
    try:
        mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if before_seal is not None:
            before_seal(fd)
    finally:
        os.close(fd)
    return mapping, None


def _sealed_at(address: int, name: str, num_bytes: int, before_seal: Callable[[int], None] | None = None) -> int:
    """Map new anonymous memory at `address`, in place of what is mapped there, and seal it; return its descriptor."""
    fd = linux.memfd(name, num_bytes)
    try:
        linux.map_file_at(address, num_bytes, fd, writable=True)
        if before_seal is not None:
            before_seal(fd)
        linux.seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def address_of(memory: mmap.mmap) -> int:
    """Return where it is mapped."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


_POOL_NAME = "pdmesh-kv"


@dataclass(frozen=True)
class KVShape:
    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_layer_block(self) -> int:
        """Return the bytes of one block's keys (or values) in one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block: keys and values of all layers."""
        return self.num_layers * 2 * self.bytes_per_layer_block

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


class KVPool:
    """Own the pool's memory. After close(), neither `tensor` nor `memory()` may be used.

    Views handed out (`block_view`, `memory`) must be released by their holders: one that is still held at close() keeps the
    mapping, and only the mapping, until it is dropped.
    """

    def __init__(
        self,
        shape: KVShape,
        device: str = "cpu",
        *,
        shared: bool = True,
        before_seal: Callable[[int], None] | None = None,
    ) -> None:
        """`shared` False: no other process maps the pool, so it may lie in huge pages, which shared memory mostly has not: over
        long contexts attention is then up to twice as fast. `before_seal` gets the descriptor of shared memory while it can still
        be mapped for writing, by processes that compute with this one."""
        self.shape = shape
        self.fd: int | None = None
        self._map: mmap.mmap | None = None
        self._pages: TouchedPages | None = None
        self._is_shared = False
        if device == "cpu":
            num_bytes = shape.num_bytes
            if shared:
                self._map, self.fd = shared_memory(_POOL_NAME, num_bytes, before_seal)
            else:
                self._map = private_memory(num_bytes)
            self._tensor: Tensor | None = torch.frombuffer(self._map, dtype=shape.dtype).view(shape.tensor_shape)
            self._is_shared = shared
            self._pages = self._touched()
        else:
            # Zeroed as bytes: not every operator of torch takes every narrow dtype.
            zeros = torch.zeros(shape.num_bytes, dtype=torch.uint8, device=device)
            self._tensor = zeros.view(shape.dtype).view(shape.tensor_shape)

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            raise ValueError("the KV pool is closed")
        return self._tensor

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def num_blocks(self) -> int:
        return self.shape.num_blocks

    @property
    def num_planes(self) -> int:
        return 2

    @property
    def bytes_per_layer_block(self) -> int:
        return self.shape.bytes_per_layer_block

    def memory(self) -> memoryview:
        """Return the whole pool as writable bytes. Raises ValueError when closed or not in CPU memory."""
        if self._map is None:
            raise ValueError("the KV pool is closed or not in CPU memory; its bytes cannot be viewed")
        return memoryview(self._map)

    def block_view(self, layer: int, plane: int, block_id: int) -> memoryview:
        """Return writable bytes of one block's keys (plane 0) or values (1) in one layer. Raises IndexError outside the pool."""
        for name, value, limit in (
            ("layer", layer, self.num_layers),
            ("plane", plane, 2),
            ("block_id", block_id, self.num_blocks),
        ):
            if not 0 <= value < limit:
                raise IndexError(f"{name} {value} is not in [0, {limit})")
        size = self.bytes_per_layer_block
        start = ((layer * 2 + plane) * self.num_blocks + block_id) * size
        with self.memory() as whole:
            return whole[start : start + size]

    def reach(self, block_id: int) -> None:
        """Record that blocks up to this one are in use, and the next ones will be soon. One thread at a time calls it."""
        if self._pages is not None:
            self._pages.reach(block_id)

    def forget(self) -> int:
        """Give the memory of all blocks back, whose content is lost, and return how many bytes that were. Nothing may use the
        pool meanwhile. The addresses stay; the descriptor is another one, since a sealed file cannot be emptied: peers that have
        the old one mapped keep its memory until they unmap it. Raises OSError, and nothing has changed, where the memory cannot
        be given back: a device's, or that of ranks."""
        if self._map is None or self._pages is None or (self._is_shared and MEMFD.is_there and self.fd is None):
            raise OSError(errno.ENOTSUP, "only a pool in the CPU memory of one process can be given back")
        address, num_bytes = self.tensor.data_ptr(), self.shape.num_bytes
        pages, self._pages = self._pages, None
        pages.close()
        try:
            if self.fd is None:
                linux.forget_pages(address, num_bytes)
            else:
                former, self.fd = self.fd, _sealed_at(address, _POOL_NAME, num_bytes)
                os.close(former)
        except OSError:
            self._pages = self._touched()
            raise
        return pages.num_blocks * self.shape.bytes_per_block

    def touch(self) -> None:
        """Touch the pages of the first blocks again, after `forget`."""
        if self._pages is None and self._map is not None:
            self._pages = self._touched()

    def _touched(self) -> TouchedPages:
        shape = self.shape
        return TouchedPages(self.tensor.data_ptr(), 2 * shape.num_layers, shape.num_blocks, shape.bytes_per_layer_block)

    def close(self) -> None:
        """Free the memory; idempotent."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        self._tensor = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self._map is not None:
            # A view still held elsewhere pins the mapping (BufferError); it is unmapped when that view is dropped.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
