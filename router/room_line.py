"""The line of admitted requests that found no room on any decode worker: only its head tries again, so that nobody starves.

It stands by arrival, as admission let them in: fair between tenants. Who was interrupted here goes first. A priority orders a
tenant's own among the places that they have in the line: it takes none from others.
"""

import asyncio
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(order=True)
class Turn:
    """A request in the line. `ahead` is set when nobody is before it."""

    priority: int
    arrival: int
    tenant: str = ""
    interrupted: bool = False
    ahead: asyncio.Event = field(compare=False, default_factory=asyncio.Event)


class RoomLine:
    """One line for each key: requests that different workers can serve must not wait for each other."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, list[Turn]] = {}
        self._arrivals = itertools.count()

    def is_empty(self, key: Hashable) -> bool:
        """Nobody waits."""
        return not self._lines.get(key)

    def enter(self, key: Hashable, priority: int, tenant: str = "", *, interrupted: bool = False) -> Turn:
        """Stand in line; leave with `leave`. `interrupted`: this router has placed it before, and its output is under way."""
        turn = Turn(priority, next(self._arrivals), tenant, interrupted)
        line = self._lines.setdefault(key, [])
        if interrupted:
            line.insert(sum(other.interrupted for other in line), turn)
        else:
            line.append(turn)
            _order_own(line, tenant)
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
        for turn in line[1:]:
            turn.ahead.clear()  # somebody stepped before it
        if line:
            line[0].ahead.set()


def _order_own(line: list[Turn], tenant: str) -> None:
    """The tenant's requests change places among themselves, by priority, then arrival."""
    places = [place for place, turn in enumerate(line) if turn.tenant == tenant and not turn.interrupted]
    for place, turn in zip(places, sorted(line[place] for place in places), strict=True):
        line[place] = turn
