"""The queue of admitted requests that found no room on any decode worker: the first one tries again, so that none starves.

It is in order of arrival, which is the order of admission: fair between tenants. A request that was interrupted here goes first.
A priority orders the requests of one tenant among the places that they have in the queue, and a hint (priority_hint) those of one
priority: they take none from other tenants.

One try at a time would be no faster than Submit, which a worker answers between two of its steps: after a short shortage the
queue would last as long as the load. So each success of the first request doubles the number that may try at once, and after a
failure only the first may.
"""

import asyncio
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_TRYING = 64


@dataclass(order=True)
class Waiter:
    """Hold a request in the queue. `lateness`: the negative hint. `may_try` is set while it is among the first, as many as may
    try at once."""

    priority: int
    lateness: int
    arrival: int
    tenant: str = ""
    interrupted: bool = False
    may_try: asyncio.Event = field(compare=False, default_factory=asyncio.Event)


@dataclass
class _Queue:
    waiters: list[Waiter] = field(default_factory=list)
    num_trying: int = 1


class CapacityQueue:
    """Hold one queue for each key: requests that different workers can serve must not wait for each other."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, _Queue] = {}
        self._arrivals = itertools.count()

    def is_empty(self, key: Hashable) -> bool:
        """Return True if no request waits."""
        return key not in self._queues

    def enter(self, key: Hashable, priority: int, tenant: str = "", *, interrupted: bool = False, hint: int = 0) -> Waiter:
        """Add a request; `leave` has to follow. `interrupted`: this router has placed it before, and its output is under way."""
        waiter = Waiter(priority, -hint, next(self._arrivals), tenant, interrupted)
        queue = self._queues.setdefault(key, _Queue())
        if interrupted:
            queue.waiters.insert(sum(other.interrupted for other in queue.waiters), waiter)
        else:
            queue.waiters.append(waiter)
            _order_own(queue.waiters, tenant)
        _call(queue)
        return waiter

    def failed(self, key: Hashable) -> None:
        """Record that a request found no room: from now on only the first may try."""
        queue = self._queues[key]
        queue.num_trying = 1
        _call(queue)

    def leave(self, key: Hashable, waiter: Waiter, *, placed: bool = False) -> None:
        """Remove a request, placed or not."""
        queue = self._queues[key]
        if placed and queue.waiters[0] is waiter:
            queue.num_trying = min(MAX_TRYING, 2 * queue.num_trying)
        queue.waiters.remove(waiter)
        if queue.waiters:
            _call(queue)
        else:
            del self._queues[key]


def _call(queue: _Queue) -> None:
    """Let the first ones try; the others wait, also those that were allowed to and have been overtaken."""
    for place, waiter in enumerate(queue.waiters):
        if place < queue.num_trying:
            waiter.may_try.set()
        else:
            waiter.may_try.clear()


def _order_own(waiters: list[Waiter], tenant: str) -> None:
    """Sort the tenant's requests among the places that they have, by priority, then hint, then arrival."""
    places = [place for place, waiter in enumerate(waiters) if waiter.tenant == tenant and not waiter.interrupted]
    for place, waiter in zip(places, sorted(waiters[place] for place in places), strict=True):
        waiters[place] = waiter
