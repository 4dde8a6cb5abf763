"""Tells all pages that look of what has changed: the latest state, at most once a second; who is slow gets fewer of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

MIN_PERIOD_S = 1.0  # as often as routers are asked
KEEP_ALIVE_S = 10.0
MAX_CLIENTS = 32


class TooMany(Exception):
    """Of pages that look."""


class Events:
    """One text for everybody, made once when it is due."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._changed = asyncio.Event()
        self._published = asyncio.Condition()
        self._text, self._number = "", 0
        self._num_clients = 0
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def num_clients(self) -> int:
        """That look now."""
        return self._num_clients

    def start(self) -> None:
        """Begins to publish."""
        self._task = asyncio.create_task(self._run(), name="events")

    async def stop(self) -> None:
        """Ends all streams. Idempotent."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        async with self._published:
            self._published.notify_all()

    def changed(self) -> None:
        """There is something new."""
        self._changed.set()

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events for one client: at first the state of now. Raises TooMany."""
        if self._num_clients >= MAX_CLIENTS:
            raise TooMany
        self._num_clients += 1
        try:
            yield f"retry: 2000\ndata: {self._make()}\n\n"
            number = self._number
            while not self._is_closed:
                is_news = await self._wait(number)
                if is_news:
                    number = self._number
                yield f"data: {self._text}\n\n" if is_news else "event: alive\ndata:\n\n"
        finally:
            self._num_clients -= 1

    async def _wait(self, number: int) -> bool:
        """Until there is another state than `number`; False: nothing has happened for a while."""
        async with self._published:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S / 2):
                    await self._published.wait_for(lambda: self._number != number or self._is_closed)
            except TimeoutError:
                return False
        return self._number != number

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._num_clients:
                self._text = self._make()
                async with self._published:
                    self._number += 1
                    self._published.notify_all()
            await asyncio.sleep(MIN_PERIOD_S)
