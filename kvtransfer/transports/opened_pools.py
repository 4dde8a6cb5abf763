"""Peers' pools on devices of this host, opened in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvtransfer.transports.peer_pool_cache import KeptPools

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.ipc_pool import PeerPool

OpenedKey = tuple[object, ...]


class OpenedPools(KeptPools[OpenedKey, "PeerPool"]):
    """To open one may take milliseconds of the driver."""

    def __init__(self) -> None:
        super().__init__()
        self._opening = asyncio.Lock()

    async def acquire(self, key: OpenedKey, open_pool: Callable[[], Awaitable[PeerPool]]) -> PeerPool:
        """The pool of `key`, opened unless it is, until release(). Raises what opening does."""
        async with self._opening:
            return self.use(key, self.find(key) or await open_pool())
