"""The line of admitted requests that found no room on any decode worker: only its head tries again, so that nobody starves."""

import asyncio
import itertools
from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(order=True)
class Turn:
    """A place in the line: by priority, then arrival. `ahead` is set when nobody is before it."""

    priority: int
    arrival: int
    ahead: asyncio.Event = field(compare=False, default_factory=asyncio.Event)


class RoomLine:
    """One line for each key: requests that different workers can serve must not wait for each other."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, list[Turn]] = {}
        self._arrivals = itertools.count()

    def is_empty(self, key: Hashable) -> bool:
        """Nobody waits."""
        return not self._lines.get(key)

    def enter(self, key: Hashable, priority: int) -> Turn:
        """Stand in line; leave with `leave`."""
        turn = Turn(priority, next(self._arrivals))
        insort(self._lines.setdefault(key, []), turn)
        self._call_head(key)
        return turn

    def leave(self, key: Hashable, turn: Turn) -> None:
        """Step out, placed or not."""
        line = self._lines[key]
        line.remove(turn)
        if not line:
            del self._lines[key]
        self._call_head(key)

    def _call_head(self, key: Hashable) -> None:
        line = self._lines.get(key, [])
        for turn in line[1:2]:
            turn.ahead.clear()  # somebody with priority stepped before it
        if line:
            line[0].ahead.set()
