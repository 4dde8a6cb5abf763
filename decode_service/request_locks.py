"""One lock for each request id in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestLocks:
    """What happens to one request happens one after the other; different requests do not wait for each other."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def __call__(self, request_id: str) -> AsyncIterator[None]:
        lock, num_users = self._locks.get(request_id, (asyncio.Lock(), 0))
        self._locks[request_id] = (lock, num_users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._locks[request_id]
            if num_users == 1:
                del self._locks[request_id]
            else:
                self._locks[request_id] = (lock, num_users - 1)

    def __len__(self) -> int:
        return len(self._locks)
