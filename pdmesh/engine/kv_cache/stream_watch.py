"""Who hears that a stream has come past a point: one thread sleeps until the earliest point that anybody asked about.

    tell(12) ─┐
    tell(4) ──┼─► [4, 7, 12] ─► the thread sleeps until 4, then says so; until 7; ...
    tell(7) ──┘

A point that is asked about while the thread sleeps for a later one is heard of when that one is passed.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

Wait = Callable[[], None]


@dataclass(order=True)
class _Asked:
    position: int
    number: int  # of two with one position, who asked first
    wait: Wait = field(compare=False)
    future: Future[None] = field(compare=False)


class StreamWatch:
    """`tell` and `close` from any thread. The thread starts with the first question."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []  # a heap
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def tell(self, position: int, wait: Wait) -> Future[None]:
        """Done when the stream is past `position`; `wait` sleeps until it is, and what it raises is the future's exception.
        May be cancelled."""
        future: Future[None] = Future()
        with self._changed:
            heapq.heappush(self._asked, _Asked(position, next(self._numbers), wait, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kv-marks", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Behind all that was asked; idempotent."""
        with self._changed:
            thread, self._thread, self._is_closed = self._thread, None, True
            self._changed.notify()
        if thread is not None:
            thread.join()
        self._is_closed = False

    def _watch(self) -> None:
        while (asked := self._earliest()) is not None:
            if not asked.future.set_running_or_notify_cancel():
                continue
            try:
                asked.wait()
            except Exception as error:  # noqa: BLE001  it belongs to who asked
                asked.future.set_exception(error)
            else:
                asked.future.set_result(None)

    def _earliest(self) -> _Asked | None:
        """None: closed, and nobody waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._is_closed)
            return heapq.heappop(self._asked) if self._asked else None
