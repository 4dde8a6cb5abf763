"""Cache of peers' pools that this process has opened; they are kept for a while after their last use."""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import grpc

from kvtransfer.errors import TransferRefused
from kvtransfer.manifest import PoolShape
from pdmesh.runtime import failpoints

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.ipc_pool import PeerPool


KEEP_S = 5.0  # an unused pool is kept so long for the next push of its sender


class Closable(Protocol):
    def close(self) -> None: ...


Key = TypeVar("Key")
Pool = TypeVar("Pool", bound=Closable)


@dataclass
class _Kept(Generic[Pool]):
    pool: Pool
    num_users: int = 0
    expiry: asyncio.TimerHandle | None = None


class KeptPools(Generic[Key, Pool]):
    """Open each pool once, however many pushes come out of it. An unused pool is closed after KEEP_S: it would keep the memory of
    a peer that has died. It is used on the event loop only."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept[Pool]] = {}

    def __len__(self) -> int:
        """Return the number of open pools."""
        return len(self._kept)

    def find(self, key: Key) -> Pool | None:
        """Return the pool of `key`, if it is open; `use` it in the same turn of the loop."""
        kept = self._kept.get(key)
        return None if kept is None else kept.pool

    def use(self, key: Key, pool: Pool) -> Pool:
        """Return `pool`, held as the one of `key` until release(): what `find` found, or one just opened, which the cache then
        owns."""
        kept = self._kept.setdefault(key, _Kept(pool))
        assert kept.pool is pool, "there is one opening for each key"
        if kept.expiry is not None:
            kept.expiry.cancel()
            kept.expiry = None
        kept.num_users += 1
        return pool

    def release(self, pool: Pool) -> None:
        """End one use(); nothing reads the pool for this user any more."""
        key, kept = next((key, kept) for key, kept in self._kept.items() if kept.pool is pool)
        kept.num_users -= 1
        if kept.num_users == 0 and not KEEP_S:
            self._expire(key)
        elif kept.num_users == 0:
            kept.expiry = asyncio.get_running_loop().call_later(KEEP_S, self._expire, key)

    def close(self) -> None:
        """Close the pools that are not in use; idempotent."""
        for key in [key for key, kept in self._kept.items() if kept.num_users == 0]:
            self._expire(key)

    def _expire(self, key: Key) -> None:
        kept = self._kept.pop(key)
        if kept.expiry is not None:
            kept.expiry.cancel()
        kept.pool.close()


# Peers' pools that are mapped read-only into this process


if sys.platform == "linux":
    import fcntl

MappedKey = tuple[int, int, PoolShape]


class MappedPool:
    """Map a peer's pool read-only. Raises TransferRefused (UNIMPLEMENTED: use another transport) if that is unsafe."""

    def __init__(self, fd: int, shape: PoolShape) -> None:
        _check_pool(fd, shape)
        self.shape = shape
        try:
            failpoints.hit("shm.map")
            self._map = mmap.mmap(fd, shape.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise _unusable(f"cannot be mapped: {error}") from error

    def view(self) -> memoryview:
        """Return all bytes of the pool; release the view before close()."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap the pool; idempotent."""
        self._map.close()


class MappedPools(KeptPools[MappedKey, MappedPool]):
    """Cache mappings, because touching every page of a fresh mapping costs a third of the copying."""

    def acquire(self, fd: int, shape: PoolShape) -> MappedPool:
        """Return the pool behind `fd`, until release(). Raises TransferRefused as MappedPool does."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, shape)  # while it is mapped, no other file can have its number
        pool = self.find(key)
        if pool is not None:
            _check_pool(fd, shape)
        return self.use(key, pool or MappedPool(fd, shape))


def _check_pool(fd: int, shape: PoolShape) -> None:
    """Check the file: one that could shrink would turn our copy into SIGBUS; one of another size is not the pool of the hello."""
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


# Peers' pools on devices of this host that are open in this process


OpenedKey = tuple[object, ...]


class OpenedPools(KeptPools[OpenedKey, "PeerPool"]):
    """Cache opened pools, because opening one may take the driver milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._opening = asyncio.Lock()

    async def acquire(self, key: OpenedKey, open_pool: Callable[[], Awaitable[PeerPool]]) -> PeerPool:
        """Return the pool of `key`, opened if it is not open, until release(). Raises what opening does."""
        async with self._opening:
            return self.use(key, self.find(key) or await open_pool())
