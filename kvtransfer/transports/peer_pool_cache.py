"""Peers' pools that this process has opened, kept for a while beyond their last use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

KEEP_S = 5.0  # one that nobody uses: the next push of its sender finds it there


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
    """One opening for each pool, however many pushes come out of it. One that is not used is closed after KEEP_S: it would keep
    the memory of a peer that has died. On the event loop."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept[Pool]] = {}

    def __len__(self) -> int:
        """Pools that are open."""
        return len(self._kept)

    def find(self, key: Key) -> Pool | None:
        """The pool of `key`, if it is open; `use` it in the same turn of the loop."""
        kept = self._kept.get(key)
        return None if kept is None else kept.pool

    def use(self, key: Key, pool: Pool) -> Pool:
        """`pool`, as the one of `key`, until release(): what `find` found, or one just opened, which is ours from now on."""
        kept = self._kept.setdefault(key, _Kept(pool))
        assert kept.pool is pool, "there is one opening for each key"
        if kept.expiry is not None:
            kept.expiry.cancel()
            kept.expiry = None
        kept.num_users += 1
        return pool

    def release(self, pool: Pool) -> None:
        """Once for each use(); nothing reads it for this user any more."""
        key, kept = next((key, kept) for key, kept in self._kept.items() if kept.pool is pool)
        kept.num_users -= 1
        if kept.num_users == 0 and not KEEP_S:
            self._expire(key)
        elif kept.num_users == 0:
            kept.expiry = asyncio.get_running_loop().call_later(KEEP_S, self._expire, key)

    def close(self) -> None:
        """Those that nobody uses; idempotent."""
        for key in [key for key, kept in self._kept.items() if kept.num_users == 0]:
            self._expire(key)

    def _expire(self, key: Key) -> None:
        kept = self._kept.pop(key)
        if kept.expiry is not None:
            kept.expiry.cancel()
        kept.pool.close()
