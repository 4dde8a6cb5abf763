"""Requests that found no room on any decode worker, and who of them tries again, as in `router/room_line.py` and the placer."""

from collections.abc import Callable

from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.request import Request
from router.lifecycle.capacity_queue import MAX_TRYING
from router.lifecycle.placement import MIN_RETRY_GAP_S, RETRY_PERIOD_S


class Line:
    """`attempt` is called with the first ones whenever there may be room; it answers with `left` or `failed`."""

    def __init__(self, events: EventQueue, attempt: Callable[[Request], None]) -> None:
        self._events, self._attempt = events, attempt
        self._line: list[Request] = []
        self._trying: set[Request] = set()
        self._num_trying = 1
        self._may_try_at = 0.0
        self._version = 0

    def __len__(self) -> int:
        return len(self._line)

    def join(self, request: Request) -> None:
        """It waits behind the others. Alone, it has just tried in vain."""
        request.waits_since = self._events.now
        self._line.append(request)
        if len(self._line) == 1:
            self.failed(request)
        elif len(self._trying) < self._num_trying:
            self.opened()

    def join_first(self, request: Request) -> None:
        """Its output is under way: it goes before the others."""
        request.waits_since = self._events.now
        self._line.insert(0, request)
        if len(self._trying) < self._num_trying:
            self.opened()

    def is_trying(self, request: Request) -> bool:
        """Is an attempt of it under way?"""
        return request in self._trying

    def opened(self) -> None:
        """Somebody reported or ended."""
        if self._line and len(self._trying) < self._num_trying:
            self._try_at(max(self._events.now, self._may_try_at))

    def failed(self, request: Request) -> None:
        """Its attempt found no room."""
        self._trying.discard(request)
        self._num_trying = 1
        self._may_try_at = self._events.now + MIN_RETRY_GAP_S
        self._try_at(self._events.now + RETRY_PERIOD_S)

    def left(self, request: Request, *, placed: bool = True) -> None:
        """It has found a place, or has given up."""
        if placed and self._line[0] is request:
            self._num_trying = min(MAX_TRYING, 2 * self._num_trying)
        self._line.remove(request)
        self._trying.discard(request)
        if self._line:
            self._try_at(self._events.now)
        else:
            self._num_trying = 1

    def _try_at(self, at_s: float) -> None:
        self._version += 1
        self._events.at(at_s, self._try, self._version)

    def _try(self, version: int) -> None:
        if version != self._version:
            return
        for place, request in enumerate(self._line[: self._num_trying]):
            if place < self._num_trying and request not in self._trying:  # the one before may have failed at once
                self._trying.add(request)
                self._attempt(request)
