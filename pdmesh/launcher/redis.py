"""Provides the registry of a local mesh: a supervised embedded Redis, or a check of the user's own."""

from __future__ import annotations

import asyncio
import time

from pdmesh.launcher.member import STABLE_AFTER_S, OnEvent, backoff_s, how_it_ended
from pdmesh.runtime.child import StartFailed
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry.redis_server import EmbeddedRedis

_RETRY_PERIOD_S = 0.2


class RedisMember:
    """Supervise a Redis that restarts on the same port when it dies, empty: workers and routers register again by themselves.

    It owns its EmbeddedRedis: nothing else starts or stops it. A restart makes a new one."""

    def __init__(self, on_event: OnEvent, *, restart: bool) -> None:
        self.num_restarts = 0
        self._on_event = on_event
        self._restart = restart
        self._redis = EmbeddedRedis()
        self._watch: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._num_failures = 0

    @property
    def url(self) -> str:
        """Return the URL, which stays over restarts."""
        return self._redis.url

    @property
    def pid(self) -> int | None:
        """Return the id of the process that runs now; None between two."""
        return self._redis.pid if self._redis.running else None

    async def start(self) -> str:
        """Start it and watch it from then on; return the URL. Raises StartFailed."""
        await self._start_process()
        self._watch = asyncio.create_task(self._supervise(), name="supervise redis")
        return self.url

    async def stop(self) -> None:
        """End it for good; idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            self._watch = None
        await self._redis.stop()

    async def _start_process(self) -> None:
        self._started_at = time.monotonic()
        await self._redis.start()

    async def _supervise(self) -> None:
        while True:
            pid, code = self._redis.pid, await self._redis.wait()
            report = f"redis (pid {pid}) {how_it_ended(code)}; the mesh continues with what it knows"
            if not self._restart:
                self._on_event(report)
                return
            self._num_failures = 1 if time.monotonic() - self._started_at >= STABLE_AFTER_S else self._num_failures + 1
            await self._start_again(report)

    async def _start_again(self, report: str) -> None:
        self._redis = EmbeddedRedis(self._redis.port)
        while True:
            delay_s = backoff_s(self._num_failures)
            self._on_event(f"{report}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                await self._start_process()
            except StartFailed as error:
                report = str(error)
                self._num_failures += 1
                continue
            self.num_restarts += 1
            self._on_event(f"redis is back (pid {self._redis.pid}, {self._redis.url})")
            return


async def require_redis(url: str, timeout_s: float) -> None:
    """Wait until the user's Redis answers. Raises StartFailed with the reason for an invalid URL, or after `timeout_s`."""
    from pdmesh.runtime.registry.redis_link import (  # needs the package redis; the embedded server does not
        why_silent,
        without_password,
    )

    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        while (reason := await why_silent(url)) is not None:
            if loop.time() >= deadline:
                remedy = "start it, or leave out --redis for an embedded one"
                raise StartFailed(f"Redis at {without_password(url)} does not answer ({reason}); {remedy}")
            await asyncio.sleep(_RETRY_PERIOD_S)
    except ConfigError as error:
        raise StartFailed(str(error)) from None
