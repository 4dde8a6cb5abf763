"""Where requests wait for admission: bounded by count and bytes, by rank, fair between tenants. Pure.

A lower rank cannot fill the room: the last quarter is closed to batch, the last eighth to standard. In a full room whoever is
over its share makes way: first lower ranks for higher ones, then, within a rank, the tenant that holds most for its weight. The
newest of its requests goes.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from router.applicant import BATCH, INTERACTIVE, RANKS, STANDARD, Applicant, Ticket
from router.drain_rate import BusyClock, DrainRate
from router.fair_queue import FairQueue, Flow
from router.foresight import Outlook

MAX_LANES = 64
MAX_TRANSIT_S = 0.5
OPEN_EIGHTHS = {INTERACTIVE: 8, STANDARD: 7, BATCH: 6}


class Patience:
    """How long a lane believes forecasts that hold everybody back while nothing moves. A worker that hangs, or reports nothing
    new, must not hold them for ever: after `timeout_s` one goes by count alone, after another one two, then four."""

    def __init__(self, now: float) -> None:
        self._progress_at = now
        self._next_allowance = 1
        self._allowance = 0

    def progress(self, now: float) -> None:
        """Somebody was placed as forecasts wanted it, or the first one began to wait."""
        self._progress_at = now

    def moved(self, now: float) -> None:
        """A place came free: the mesh is alive."""
        self._progress_at = now
        self._next_allowance, self._allowance = 1, 0

    def is_over(self, now: float, timeout_s: float) -> bool:
        """Somebody may go whatever the forecast says; says so to one at a time."""
        if now - self._progress_at >= timeout_s:
            self._progress_at = now
            self._allowance, self._next_allowance = self._next_allowance, 2 * self._next_allowance
        if not self._allowance:
            return False
        self._allowance -= 1
        return True


class Transit:
    """Prompts that were let in and have not reached a worker: no forecast contains them yet."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[float, float]] = {}

    def enter(self, number: int, seconds: float, now: float) -> None:
        """The ticket with this number has been let in; its prompt takes so long."""
        self._under_way[number] = (now + MAX_TRANSIT_S, seconds)

    def leave(self, number: int) -> None:
        """It has been sent to a worker, or given up; idempotent."""
        self._under_way.pop(number, None)

    def seconds(self, now: float) -> float:
        """Of all who are on their way. Whoever takes too long waits for something else, and stands in nobody's way."""
        while self._under_way:
            number = next(iter(self._under_way))
            if self._under_way[number][0] > now:
                break
            del self._under_way[number]
        return sum(seconds for _, seconds in self._under_way.values())


class Lane:
    """Those who wait for the same workers, by rank; and what is known of them."""

    def __init__(self, now: float, max_queued: int, max_bytes: int) -> None:
        self.queues = {rank: FairQueue(1 / max(1, max_queued), 1 / max_bytes) for rank in RANKS}
        self.drain = DrainRate()
        self.clock = BusyClock()
        self.transit = Transit()
        self.patience = Patience(now)
        self.num_before_aged = 0
        self.served_at = 0

    @property
    def num_waiting(self) -> int:
        """Of all ranks."""
        return sum(queue.num_waiting for queue in self.queues.values())

    @property
    def cost(self) -> float:
        """Tokens of all who wait."""
        return sum(queue.cost for queue in self.queues.values())

    @property
    def top_rank(self) -> int:
        """The highest that waits; somebody does."""
        return next(rank for rank in RANKS if self.queues[rank].num_waiting)

    def tick(self, now: float, *, is_full: bool) -> float:
        """Seconds in which somebody of this lane needed a place."""
        return self.clock.advance(now, busy=is_full or self.num_waiting > 0)

    def somebody_before(self, rank: int) -> bool:
        """Does somebody wait for a turn whom a newcomer of `rank` must not pass?"""
        return any(self.queues[other].num_waiting and self.queues[other].head() for other in range(INTERACTIVE, rank + 1))

    def outlook(self, applicant: Applicant) -> Outlook:
        """Of its tenant: who floods does not close the gate to others."""
        return self.queues[applicant.rank].outlook(applicant.tenant)

    def cost_ahead(self, applicant: Applicant, weight: float) -> float:
        """Tokens that are served before a newcomer's: of higher ranks all; of its own its tenant's backlog, and what
        others are given meanwhile."""
        queue = self.queues[applicant.rank]
        flow = queue.flow(applicant.tenant, weight)
        others = queue.weight - (flow.weight if flow.num_waiting else 0.0)
        shared = flow.cost * (others + weight) / weight
        return sum(self.queues[rank].cost for rank in range(INTERACTIVE, applicant.rank)) + min(queue.cost, shared)


@dataclass(frozen=True)
class Victim:
    """Who is to make way: the newest request of `flow`."""

    queue: FairQueue
    flow: Flow
    ticket: Ticket


class WaitingRoom:
    """All lanes of one router."""

    def __init__(self, max_queued: int, max_bytes: int) -> None:
        self.max_queued = max_queued
        self.max_bytes = max_bytes
        self.num_queued = 0
        self.num_bytes = 0
        self.lanes: dict[Hashable, Lane] = {}

    def lane(self, key: Hashable, now: float) -> Lane:
        """Of that name; made when it is new."""
        if key not in self.lanes:
            if len(self.lanes) >= MAX_LANES:
                self.lanes = {name: lane for name, lane in self.lanes.items() if lane.num_waiting}
            self.lanes[key] = Lane(now, self.max_queued, self.max_bytes)
        return self.lanes[key]

    def fits(self, applicant: Applicant) -> bool:
        """There is room without anybody making way."""
        open_eighths = OPEN_EIGHTHS[applicant.rank]
        num_open = self.max_queued - self.max_queued * (8 - open_eighths) // 8
        bytes_open = self.max_bytes - self.max_bytes * (8 - open_eighths) // 8
        return self.num_queued < num_open and self.num_bytes + applicant.num_bytes <= bytes_open

    def victim(self, applicant: Applicant, weight: float) -> Victim | None:
        """Who makes way for the newcomer; None: nobody, it is refused."""
        if applicant.num_bytes > self.max_bytes or not self.max_queued:
            return None
        for rank in range(BATCH, applicant.rank, -1):
            heaviest = self._heaviest(rank)
            if heaviest is not None:
                return heaviest
        return self._heavier_tenant(applicant, weight)

    def push(self, ticket: Ticket, weight: float, now: float) -> None:
        """The caller has seen to it that it fits."""
        lane = self.lane(ticket.applicant.lane, now)
        if not lane.num_waiting:
            lane.patience.progress(now)
        self._queue_of(ticket).push(ticket, weight)
        self._count(ticket, 1)

    def serve(self, ticket: Ticket) -> None:
        """It leaves for a place."""
        self._queue_of(ticket).serve(ticket)
        self._count(ticket, -1)

    def remove(self, ticket: Ticket) -> None:
        """It leaves for nothing."""
        self._queue_of(ticket).remove(ticket)
        self._count(ticket, -1)

    def _queue_of(self, ticket: Ticket) -> FairQueue:
        return self.lanes[ticket.applicant.lane].queues[ticket.applicant.rank]

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.num_queued += sign
        self.num_bytes += sign * ticket.applicant.num_bytes

    def _heavier_tenant(self, applicant: Applicant, weight: float) -> Victim | None:
        """Somebody of the same rank who holds more for its weight than the newcomer's tenant would."""
        heaviest = self._heaviest(applicant.rank)
        if heaviest is None or heaviest.flow.tenant == applicant.tenant:
            return None
        lane = self.lanes.get(applicant.lane)
        own = None if lane is None else lane.queues[applicant.rank].flow(applicant.tenant, weight)
        num, num_bytes = (0, 0) if own is None else (own.num_waiting, own.num_bytes)
        mine = heaviest.queue.load(num + 1, num_bytes + applicant.num_bytes, weight)
        return heaviest if heaviest.flow.load > mine else None

    def _heaviest(self, rank: int) -> Victim | None:
        """Of all lanes."""
        found: Victim | None = None
        for lane in self.lanes.values():
            queue = lane.queues[rank]
            flow = queue.heaviest() if queue.num_waiting else None
            ticket = None if flow is None else flow.newest()
            if flow is not None and ticket is not None and (found is None or flow.load > found.flow.load):
                found = Victim(queue, flow, ticket)
        return found
