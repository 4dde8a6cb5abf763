"""A stream of messages that several calls pass on, each at its own time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

M = TypeVar("M")
AHEAD = 2
"""Messages that a reader may be behind another one."""


class Reader(Generic[M]):
    """Iterate over the messages. A call that ends early closes it, so that the others need not wait for it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[M | BaseException | None] = asyncio.Queue(AHEAD)
        self.is_closed = False

    def __aiter__(self) -> Reader[M]:
        return self

    async def __anext__(self) -> M:
        message = await self._queue.get()
        if message is None:
            raise StopAsyncIteration
        if isinstance(message, BaseException):
            raise message
        return message

    async def put(self, message: M | BaseException | None) -> None:
        """Give it the next message; None: the end; an error: that. Wait while it is too far behind, unless it is closed."""
        if not self.is_closed:
            await self._queue.put(message)

    def close(self) -> None:
        """Take no more; idempotent."""
        self.is_closed = True
        while not self._queue.empty():
            self._queue.get_nowait()


class FanOut(Generic[M]):
    """Pass the messages of one stream on to readers, all of which exist before the first message."""

    def __init__(self) -> None:
        self._readers: list[Reader[M]] = []

    def reader(self) -> Reader[M]:
        """Return a further reader."""
        reader = Reader[M]()
        self._readers.append(reader)
        return reader

    async def run(self, messages: AsyncIterator[M]) -> None:
        """Read until the end of the stream, or until all readers are closed. An error of the stream reaches all readers."""
        end: BaseException | None = None
        try:
            async for message in messages:
                for reader in self._readers:
                    await reader.put(message)
                if all(reader.is_closed for reader in self._readers):
                    return
        except Exception as error:  # noqa: BLE001  the readers raise it
            end = error
        for reader in self._readers:
            await reader.put(end)
