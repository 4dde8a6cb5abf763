"""Peers' pools on devices of this host, opened in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.shown_pool import PeerPool

KEEP_S = 5.0  # a pool that nobody uses: the next push of its sender finds it open

Key = tuple[object, ...]


@dataclass
class _Kept:
    pool: PeerPool
    num_users: int = 0
    expiry: asyncio.TimerHandle | None = None


class OpenedPools:
    """One opening for each pool, however many pushes come out of it: to open one may take milliseconds of the driver. One that is
    not used is closed after KEEP_S: it would keep the memory of a peer that has died. On the event loop."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}
        self._opening = asyncio.Lock()

    def __len__(self) -> int:
        """Pools that are open."""
        return len(self._kept)

    async def acquire(self, key: Key, open_pool: Callable[[], Awaitable[PeerPool]]) -> PeerPool:
        """The pool of `key`, opened unless it is, until release(). Raises what opening does."""
        async with self._opening:
            kept = self._kept.get(key)
            if kept is None:
                kept = self._kept[key] = _Kept(await open_pool())
        if kept.expiry is not None:
            kept.expiry.cancel()
            kept.expiry = None
        kept.num_users += 1
        return kept.pool

    def release(self, pool: PeerPool) -> None:
        """Once for each acquire(); no copy out of it is under way."""
        key, kept = next((key, kept) for key, kept in self._kept.items() if kept.pool is pool)
        kept.num_users -= 1
        if kept.num_users == 0 and not KEEP_S:
            self._expire(key)
        elif kept.num_users == 0:
            kept.expiry = asyncio.get_running_loop().call_later(KEEP_S, self._expire, key)

    def close(self) -> None:
        """What nobody uses; idempotent."""
        for key, kept in list(self._kept.items()):
            if kept.num_users == 0:
                self._expire(key)

    def _expire(self, key: Key) -> None:
        kept = self._kept.pop(key)
        if kept.expiry is not None:
            kept.expiry.cancel()
        kept.pool.close()
