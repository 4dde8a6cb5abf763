"""Runs long work on behalf of clients on few threads, with a bounded queue and a time limit for each piece."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pdmesh.runtime.errors import ResourceExhausted

T = TypeVar("T")


class WorkThreads:
    """Run up to `num_threads` threads, started on demand; the process does not wait for them at its end."""

    def __init__(self, name: str, *, num_threads: int, max_waiting: int, timeout_s: float) -> None:
        """Create them. At most `max_waiting` pieces run or wait; `timeout_s` counts from when a piece begins."""
        self.max_waiting = max_waiting
        self.timeout_s = timeout_s
        self._name = name
        self._waiting: set[asyncio.Future[Any]] = set()
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises TimeoutError (the thread continues), ResourceExhausted when the queue is full."""
        if len(self._waiting) >= self.max_waiting:
            raise ResourceExhausted(f"{self.max_waiting} pieces of work wait in line ({self._name})", retry_delay_s=1.0)
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def begin() -> T:
            with contextlib.suppress(RuntimeError):  # the loop has ended: no task waits any more
                loop.call_soon_threadsafe(begun.set)
            return work()

        future = loop.run_in_executor(self._executor, begin)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        try:
            await begun.wait()
            async with asyncio.timeout(self.timeout_s):
                return await future
        finally:
            future.cancel()  # if it has not begun
