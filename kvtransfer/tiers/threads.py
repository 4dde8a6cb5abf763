"""Threads for what tiers read, write and copy. They run behind everything else, and do not keep the process from ending."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvtransfer.stream import settled
from pdmesh.platform.capabilities import THREAD_PRIORITY

T = TypeVar("T")
NICENESS = 10


class TierThreads:
    """Run functions in threads that end with the process, whatever a disk does to them."""

    def __init__(self, num_threads: int, *, name: str, is_behind: bool) -> None:
        """`is_behind`: they get the processor where nothing else wants it, if threads have priorities here."""
        self.num_threads = num_threads
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_behind = is_behind
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        """Return the future of a call."""
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn())
                except BaseException as error:  # noqa: BLE001  the caller gets it, whatever it is
                    future.set_exception(error)

        self._queue.put(call)
        return future

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """Return what `fn` returns. A caller that is cancelled waits for its end."""
        future = self.submit(lambda: fn(*args))
        await settled(future)
        return future.result()

    def check_interrupted(self) -> None:
        """Do nothing: what runs here is not interrupted (kvtransfer.stream.Stream)."""

    def close(self) -> None:
        """Let the threads end, without waiting for them."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        if self._is_behind and THREAD_PRIORITY.is_there:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (call := self._queue.get()) is not None:
            call()
