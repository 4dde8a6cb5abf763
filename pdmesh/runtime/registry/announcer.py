"""Keeps a registration alive in the background: writes it at once, renews it in time, withdraws it at the end.

announcer = worker_announcer(registry, worker.info)     # a callable: the record follows changes of roles
announcer.start()
announcer.renew_now()                                    # after a change
await announcer.stop()                                   # deregisters
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pdmesh.runtime.registry.registry import Registry
from pdmesh.v1.worker_pb2 import WorkerInfo

logger = logging.getLogger(__name__)


class Announcer:
    """Calls `put` every `period_s` seconds (and on `renew_now`) until `stop`, then `remove` once."""

    def __init__(self, put: Callable[[], Awaitable[bool]], remove: Callable[[], Awaitable[bool]], period_s: float) -> None:
        self._put = put
        self._remove = remove
        self._period_s = period_s
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins; returns at once."""
        self._task = asyncio.create_task(self._run(), name="announcer")

    def renew_now(self) -> None:
        """Renews without waiting for the period."""
        self._wake.set()

    async def stop(self) -> None:
        """Ends the renewals, then withdraws the record; idempotent."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        await self._remove()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            await self._put_logged()
            try:
                async with asyncio.timeout(self._period_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _put_logged(self) -> None:
        try:
            await self._put()
        except Exception:  # a wrong record must not end the renewals: the next one may be right
            logger.exception("the registration could not be written")


def worker_announcer(registry: Registry, info: Callable[[], WorkerInfo]) -> Announcer:
    """Announces the worker that `info` describes at each renewal."""
    return Announcer(lambda: registry.renew(info()), lambda: registry.deregister(info()), registry.ttl_s / 3)


def router_announcer(registry: Registry, router_id: str, address: str, epoch: int) -> Announcer:
    """Announces a router."""
    return Announcer(
        lambda: registry.register_router(router_id, address, epoch),
        lambda: registry.deregister_router(router_id, epoch),
        registry.ttl_s / 3,
    )
