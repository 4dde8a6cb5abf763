"""Peers' pools, mapped read-only into this process."""

from __future__ import annotations

import mmap
import os
import sys

import grpc

from kvtransfer.errors import TransferRefused
from kvtransfer.memory import PoolShape
from kvtransfer.transports.peer_pool_cache import KeptPools
from pdmesh.runtime import failpoints

if sys.platform == "linux":
    import fcntl

MappedKey = tuple[int, int, PoolShape]


class MappedPool:
    """A peer's pool, mapped read-only. Raises TransferRefused (UNIMPLEMENTED: use another transport) if that is unsafe."""

    def __init__(self, fd: int, shape: PoolShape) -> None:
        _check_pool(fd, shape)
        self.shape = shape
        try:
            failpoints.hit("shm.map")
            self._map = mmap.mmap(fd, shape.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise _unusable(f"cannot be mapped: {error}") from error

    def view(self) -> memoryview:
        """All bytes; to be released before close()."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap; idempotent."""
        self._map.close()


class MappedPools(KeptPools[MappedKey, MappedPool]):
    """To touch every page of a fresh mapping costs a third of the copying."""

    def acquire(self, fd: int, shape: PoolShape) -> MappedPool:
        """The pool behind `fd`, until release(). Raises TransferRefused as MappedPool does."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, shape)  # while it is mapped, no other file can have its number
        pool = self.find(key)
        if pool is not None:
            _check_pool(fd, shape)
        return self.use(key, pool or MappedPool(fd, shape))


def _check_pool(fd: int, shape: PoolShape) -> None:
    """A file that could shrink would turn our copy into SIGBUS; one of another size is not the pool that hello describes."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise _unusable(f"is not a sealable memfd: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise _unusable("is not sealed against shrinking (F_SEAL_SHRINK)")
    if shape.num_bytes == 0 or size != shape.num_bytes:
        raise _unusable(f"has {size} bytes; pool_num_blocks {shape.num_blocks} and the layout make {shape.num_bytes}")


def _unusable(what: str) -> TransferRefused:
    return TransferRefused(grpc.StatusCode.UNIMPLEMENTED, f"the pool's file descriptor {what}", field="hello.pool")
