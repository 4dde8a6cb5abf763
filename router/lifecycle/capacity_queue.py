"""The line of admitted requests that found no room on any decode worker: who is first tries again, so that nobody starves.

It stands by arrival, as admission let them in: fair between tenants. Who was interrupted here goes first. A priority orders a
tenant's own among the places that they have in the line: it takes none from others.

One at a time would be no faster than Submit, which a worker answers between two of its steps: a line that began with a moment's
shortage would last as long as the load. So each place that the first finds lets twice as many try at once, and each try that
fails, nobody but the first.
"""

import asyncio
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_TRYING = 64


@dataclass(order=True)
class Waiter:
    """A request in the line. `may_try` is set when it is among the first of them, as many as may try at once."""

    priority: int
    arrival: int
    tenant: str = ""
    interrupted: bool = False
    may_try: asyncio.Event = field(compare=False, default_factory=asyncio.Event)


@dataclass
class _Line:
    dispatch_order: list[Waiter] = field(default_factory=list)
    num_trying: int = 1


class CapacityQueue:
    """One line for each key: requests that different workers can serve must not wait for each other."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._arrivals = itertools.count()

    def is_empty(self, key: Hashable) -> bool:
        """Nobody waits."""
        return key not in self._lines

    def enter(self, key: Hashable, priority: int, tenant: str = "", *, interrupted: bool = False) -> Waiter:
        """Stand in line; leave with `leave`. `interrupted`: this router has placed it before, and its output is under way."""
        turn = Waiter(priority, next(self._arrivals), tenant, interrupted)
        line = self._lines.setdefault(key, _Line())
        if interrupted:
            line.dispatch_order.insert(sum(other.interrupted for other in line.dispatch_order), turn)
        else:
            line.dispatch_order.append(turn)
            _order_own(line.dispatch_order, tenant)
        _call(line)
        return turn

    def failed(self, key: Hashable) -> None:
        """Somebody who might try found no room: now only the first may."""
        line = self._lines[key]
        line.num_trying = 1
        _call(line)

    def leave(self, key: Hashable, turn: Waiter, *, placed: bool = False) -> None:
        """Step out, placed or not."""
        line = self._lines[key]
        if placed and line.dispatch_order[0] is turn:
            line.num_trying = min(MAX_TRYING, 2 * line.num_trying)
        line.dispatch_order.remove(turn)
        if line.dispatch_order:
            _call(line)
        else:
            del self._lines[key]


def _call(line: _Line) -> None:
    """The first; the others wait, also those that somebody stepped before."""
    for place, turn in enumerate(line.dispatch_order):
        if place < line.num_trying:
            turn.may_try.set()
        else:
            turn.may_try.clear()


def _order_own(line: list[Waiter], tenant: str) -> None:
    """The tenant's requests change places among themselves, by priority, then arrival."""
    limiter = [place for place, turn in enumerate(line) if turn.tenant == tenant and not turn.interrupted]
    for place, turn in zip(limiter, sorted(line[place] for place in limiter), strict=True):
        line[place] = turn
