"""Waiting for something to change without missing it."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class Changes:
    """Take `next` before looking at the state, then wait for it: a change in between is not lost."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set at the next change from now on."""
        return self._next

    def fire(self) -> None:
        """Something changed."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether `event` was set within `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


async def unless(event: asyncio.Event, work: Coroutine[object, object, T]) -> T | None:
    """The result of `work`; None when `event` was set before, and then `work` is cancelled."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        waiting.cancel()
