"""The mesh's Redis, in our hands: paused, emptied, killed and started again at the same port."""

from __future__ import annotations

import asyncio
import os
import signal

from redis.asyncio import Redis

from pdmesh.runtime.registry.redis_server import EmbeddedRedis


class Registry:
    """Owner of an embedded Redis. `busy` is held by whoever disturbs it."""

    def __init__(self) -> None:
        self.busy = asyncio.Lock()
        self._redis = EmbeddedRedis()

    @property
    def url(self) -> str:
        """The same over restarts."""
        return self._redis.url

    @property
    def pid(self) -> int:
        return self._redis.pid

    async def start(self) -> None:
        """Starts it, the second time at the port of the first. Raises StartFailed."""
        if self._redis.port:
            self._redis = EmbeddedRedis(self._redis.port)
        await self._redis.start()

    def pause(self) -> None:
        """It hangs: connections stay, nobody gets an answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends a pause."""
        os.kill(self.pid, signal.SIGCONT)

    async def empty(self) -> None:
        """Forgets every registration."""
        redis = Redis.from_url(self.url)
        try:
            await redis.flushall()
        finally:
            await redis.aclose()

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        await self._redis.wait()

    async def stop(self) -> None:
        """Ends it for good; idempotent."""
        await self._redis.stop()
