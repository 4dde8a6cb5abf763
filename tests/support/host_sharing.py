"""Pools in shared memory of the host, shown to other processes as CUDA shows memory of a device."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtransfer.manifest import shape_of
from kvtransfer.native.library import address_of
from kvtransfer.staging import StagedMemory
from pdmesh.engine.kv_cache.block_moves import SummedCopies
from pdmesh.engine.kv_cache.copies import IndexedBlocks
from pdmesh.engine.kv_cache.cuda_ipc import NotShared, PoolHandle
from pdmesh.engine.kv_cache.ipc_pool import IndexedSums, ShownPool
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import InOrder, Streams
from tests.support.kv_memory import FakeKVMemory

PART_BYTES = 1 << 20
_HANDLE = struct.Struct("<ii")  # process, descriptor
DEVICE = b"the host's cores"


class HostPool:
    """Another process's. Satisfies pdmesh.engine.kv_cache.cuda_ipc.OpenPool."""

    def __init__(self, mapping: mmap.mmap, offset: int, num_bytes: int) -> None:
        self._mapping = mapping
        self._bytes: Tensor | None = _tensor(memoryview(mapping), offset, num_bytes)

    @property
    def bytes(self) -> Tensor:
        assert self._bytes is not None, "it is open"
        return self._bytes

    def close(self) -> None:
        """Whoever looks at it from now on is struck, as on a GPU."""
        self._bytes = None
        self._mapping.close()


@dataclass
class HostSharing:
    """Satisfies pdmesh.engine.kv_cache.cuda_ipc.PoolSharing. fd: of the memfd that the pool lies in; None: it cannot be shown."""

    fd: int | None
    device: bytes = DEVICE
    num_opened: int = 0

    def show(self, pool: Tensor) -> PoolHandle:
        if self.fd is None:
            raise NotShared("handle", "private memory has none")
        return PoolHandle(_HANDLE.pack(os.getpid(), self.fd), 0, self.device)

    def open(self, handle: PoolHandle, num_bytes: int) -> HostPool:
        if len(handle.handle) != _HANDLE.size:
            raise NotShared("handle", f"{len(handle.handle)} bytes are not {_HANDLE.size}")
        if handle.device != self.device:
            raise NotShared("device", "the sender's is not visible to this process")
        try:
            fd = os.open("/proc/{}/fd/{}".format(*_HANDLE.unpack(handle.handle)), os.O_RDONLY)
        except OSError as error:
            raise NotShared("handle", f"it does not open: {error.strerror}") from error
        try:
            size = os.fstat(fd).st_size
            if handle.offset + num_bytes > size:
                raise NotShared("offset", f"a pool of {num_bytes} bytes at {handle.offset} leads out of {size} bytes")
            mapping = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.num_opened += 1
        return HostPool(mapping, handle.offset, num_bytes)


def pool_of(memory: FakeKVMemory, block_size: int) -> Tensor:
    """The very bytes of `memory` as an engine's pool; not to be used once it is closed."""
    shape = shape_of(memory)
    raw = _tensor(memory.memory(), 0, shape.num_bytes).view(torch.int8)
    return raw.view(shape.num_layers, 2, shape.num_blocks, block_size, 1, -1)


def staged(
    memory: FakeKVMemory,
    block_size: int,
    streams: Streams | None = None,
    sharing: HostSharing | None = None,
    copies: SummedCopies | None = None,
) -> StagedMemory:
    """`memory` as the pool of a device that shows it to others; two pieces each way, of three blocks of a layer."""
    streams, pool = streams or InOrder(), pool_of(memory, block_size)
    sizes = StagingSizes(num_pieces=2, piece_bytes=6 * memory.bytes_per_layer_block)
    out, back = (Staging(pool, streams, sizes, IndexedBlocks()) for _ in range(2))
    shown = ShownPool(pool, sharing or HostSharing(memory.fd), streams, copies or IndexedSums(), PART_BYTES)
    return StagedMemory(memory, out, back, Marks(streams), shown)


def _tensor(whole: memoryview, offset: int, num_bytes: int) -> Tensor:
    """uint8 of what it shows; does not keep it open."""
    with whole:
        array = (ctypes.c_char * num_bytes).from_address(address_of(whole) + offset)
    return torch.frombuffer(array, dtype=torch.uint8)
