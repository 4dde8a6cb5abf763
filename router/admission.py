"""Admission: who may start now, who waits, who is refused with a retry delay. Pure: no clock, no I/O, no tasks.

ask ──► Ticket(admitted)                 a place is free
    ──► Ticket(waiting) ─► admitted      when `release` frees a place: by priority, then first come, first served
    ──► Refusal(reason, retry_delay_s)   in-flight and queue are full
"""

import enum
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

MIN_RETRY_DELAY_S = 0.1
MAX_RETRY_DELAY_S = 30.0
UNKNOWN_RETRY_DELAY_S = 1.0
RATE_WINDOW = 32


class TicketState(enum.Enum):
    """WAITING in the queue, ADMITTED (holds a place) or RELEASED (holds nothing)."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    RELEASED = "released"


@dataclass(order=True)
class Ticket:
    """One request's place or its turn in the queue; ordered by priority (low number first), then arrival."""

    priority: int
    arrival: int
    state: TicketState = field(compare=False, default=TicketState.WAITING)


@dataclass(frozen=True)
class Refusal:
    """No place and no room to wait; `retry_delay_s` is when a try is likely to succeed."""

    reason: str
    retry_delay_s: float


class DrainRate:
    """How fast places come free, over the last releases. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._releases: deque[float] = deque(maxlen=RATE_WINDOW)

    def record(self, now: float) -> None:
        """One place came free."""
        self._releases.append(now)

    def delay_until(self, num_ahead: int, now: float) -> float:
        """Seconds until `num_ahead + 1` more places will have come free, clamped; a default while nothing is known.

        The window ends now, not at the last release, so that a mesh that stands still promises nothing soon.
        """
        if len(self._releases) < 2:
            return UNKNOWN_RETRY_DELAY_S
        seconds_each = (now - self._releases[0]) / len(self._releases)
        return min(MAX_RETRY_DELAY_S, max(MIN_RETRY_DELAY_S, (num_ahead + 1) * seconds_each))


class Admission:
    """Bounded number in flight, bounded queue. Invariant: somebody waits only while every place is taken."""

    def __init__(self, max_inflight: int, max_queued: int) -> None:
        self.max_inflight = max_inflight
        self.max_queued = max_queued
        self.num_inflight = 0
        self.num_queued = 0
        self._queue: list[Ticket] = []
        self._arrivals = itertools.count()
        self._rate = DrainRate()

    def ask(self, priority: int, now: float) -> Ticket | Refusal:
        """A ticket (look at its state), or a refusal. Lower `priority` goes first."""
        ticket = Ticket(priority, next(self._arrivals))
        if self.num_inflight < self.max_inflight:
            self._admit(ticket)
            return ticket
        if self.num_queued >= self.max_queued:
            return self._refuse(now)
        self.num_queued += 1
        heapq.heappush(self._queue, ticket)
        return ticket

    def release(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Give a place or a turn back, in any state, as often as one likes; returns the tickets admitted instead."""
        before, ticket.state = ticket.state, TicketState.RELEASED
        if before is TicketState.WAITING:
            self.num_queued -= 1
            self._prune()
        if before is not TicketState.ADMITTED:
            return []
        self.num_inflight -= 1
        self._rate.record(now)
        return self._fill()

    def _admit(self, ticket: Ticket) -> None:
        ticket.state = TicketState.ADMITTED
        self.num_inflight += 1

    def _fill(self) -> list[Ticket]:
        admitted = []
        while self._queue and self.num_inflight < self.max_inflight:
            ticket = heapq.heappop(self._queue)
            if ticket.state is TicketState.WAITING:
                self.num_queued -= 1
                self._admit(ticket)
                admitted.append(ticket)
        return admitted

    def _prune(self) -> None:
        """Drop abandoned turns once they are the larger part of the heap, so that it stays bounded."""
        if len(self._queue) > 2 * self.num_queued + 16:
            self._queue = [ticket for ticket in self._queue if ticket.state is TicketState.WAITING]
            heapq.heapify(self._queue)

    def _refuse(self, now: float) -> Refusal:
        reason = (
            f"the router is full: {self.num_inflight} requests in flight (max_inflight {self.max_inflight}), "
            f"{self.num_queued} waiting (max_queued {self.max_queued}); retry later"
        )
        return Refusal(reason, self._rate.delay_until(self.num_queued, now))
