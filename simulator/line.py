"""Requests that found no room on any decode worker: only the head tries again, as in `router/room_line.py` and the placer."""

from collections import deque
from collections.abc import Callable

from router.placer import MIN_RETRY_GAP_S, RETRY_PERIOD_S
from simulator.events import EventQueue
from simulator.request import Request


class Line:
    """`attempt` is called with the head whenever there may be room; it answers with `placed` or `failed`."""

    def __init__(self, events: EventQueue, attempt: Callable[[Request], None]) -> None:
        self._events, self._attempt = events, attempt
        self._line: deque[Request] = deque()
        self._is_trying = False
        self._may_try_at = 0.0
        self._version = 0

    def __len__(self) -> int:
        return len(self._line)

    def join(self, request: Request) -> None:
        """It waits behind the others. Alone, it has just tried in vain."""
        request.waits_since = self._events.now
        self._line.append(request)
        if len(self._line) == 1:
            self.failed()

    def join_first(self, request: Request) -> None:
        """Its output is under way: it goes before the others, and tries when whoever tries now is through."""
        request.waits_since = self._events.now
        self._line.insert(1 if self._is_trying else 0, request)
        if not self._is_trying:
            self.failed()

    def is_head(self, request: Request) -> bool:
        """Is it its attempt that is under way?"""
        return bool(self._line) and self._line[0] is request

    def opened(self) -> None:
        """Somebody reported or ended."""
        if self._line and not self._is_trying:
            self._try_at(max(self._events.now, self._may_try_at))

    def failed(self) -> None:
        """The head's attempt found no room."""
        self._is_trying = False
        self._may_try_at = self._events.now + MIN_RETRY_GAP_S
        self._try_at(self._events.now + RETRY_PERIOD_S)

    def left(self) -> Request:
        """The head has found a place, or has given up; returns it."""
        self._is_trying = False
        head = self._line.popleft()
        if self._line:
            self._try_at(self._events.now)
        return head

    def _try_at(self, at_s: float) -> None:
        self._version += 1
        self._events.at(at_s, self._try, self._version)

    def _try(self, version: int) -> None:
        if version == self._version and self._line and not self._is_trying:
            self._is_trying = True
            self._attempt(self._line[0])
