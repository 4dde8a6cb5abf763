"""A bounded queue between what must not wait and one reader that may be slow: it drops everything rather than to grow, and the
reader starts again from a full state."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """Queue items for one reader, on one event loop. It begins as one that has dropped everything: the reader calls `restart`."""

    def __init__(self, max_weight: int) -> None:
        """`max_weight`: the sum of the weights of the items that may wait."""
        self._max_weight = max_weight
        self._items: deque[tuple[T, int]] = deque()
        self._weight = 0
        self._news = asyncio.Event()
        self.has_dropped = True
        self.closed = False

    def put(self, item: T, weight: int) -> None:
        """Add an item, or drop all where it does not fit. What comes before the next `restart` is dropped, too."""
        if self.has_dropped:
            return
        self._items.append((item, weight))
        self._weight += weight
        if self._weight > self._max_weight:
            self.drop()
        self._news.set()

    def drop(self) -> None:
        """Drop all, so that the reader starts again."""
        self._items.clear()
        self._weight = 0
        self.has_dropped = True
        self._news.set()

    def restart(self) -> None:
        """Take items from now on: the reader has the state before them."""
        self.has_dropped = False
        self._news.clear()

    def close(self) -> None:
        """End the reading; idempotent."""
        self.closed = True
        self._news.set()

    async def get(self) -> T | None:
        """Return the next item; None: items were dropped, or it is closed."""
        while not self._items and not self.has_dropped and not self.closed:
            self._news.clear()
            await self._news.wait()
        if self.has_dropped or self.closed:
            return None
        item, weight = self._items.popleft()
        self._weight -= weight
        return item
