"""Peers' pools, mapped read-only into this process."""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
from dataclasses import dataclass

import grpc

from kvtransfer.errors import TransferRefused
from kvtransfer.memory import PoolShape
from runtime import failpoints

if sys.platform == "linux":
    import fcntl

KEEP_S = 5.0  # a mapping that nobody uses: the next push of its sender finds its pages in place


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


@dataclass
class _Kept:
    pool: MappedPool
    num_users: int = 0
    expiry: asyncio.TimerHandle | None = None


class MappedPools:
    """One mapping for each pool, however many pushes come out of it: to touch every page of a fresh one costs a third of the
    copying. One that is not used is given back after KEEP_S: it would keep the memory of a peer that has died."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, PoolShape], _Kept] = {}

    def __len__(self) -> int:
        """Mappings that are there."""
        return len(self._kept)

    def acquire(self, fd: int, shape: PoolShape) -> MappedPool:
        """The pool behind `fd`, until release(). Raises TransferRefused as MappedPool does."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, shape)  # while it is mapped, no other file can have its number
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(MappedPool(fd, shape))
        else:
            _check_pool(fd, shape)
        if kept.expiry is not None:
            kept.expiry.cancel()
            kept.expiry = None
        kept.num_users += 1
        return kept.pool

    def release(self, pool: MappedPool) -> None:
        """Once for each acquire(), on the event loop."""
        key, kept = next((key, kept) for key, kept in self._kept.items() if kept.pool is pool)
        kept.num_users -= 1
        if kept.num_users == 0 and not KEEP_S:
            self._expire(key)
        elif kept.num_users == 0:
            kept.expiry = asyncio.get_running_loop().call_later(KEEP_S, self._expire, key)

    def _expire(self, key: tuple[int, int, PoolShape]) -> None:
        self._kept.pop(key).pool.close()


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
