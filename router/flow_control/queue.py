"""Where requests wait for admission: bounded by count and bytes, by rank, fair between tenants. Pure.

A lower rank cannot fill the room: the last quarter is closed to batch, the last eighth to standard. In a full room the tenant
that holds most for its weight makes way for one that holds less, whatever ranks they declare; among equals, and within a tenant,
lower ranks make way for higher ones. The newest request goes, of the lowest rank. Batch pushes nobody out but batch.
"""

from collections.abc import Hashable

from router.flow_control.capacity import BusyClock, DrainRate
from router.flow_control.fairness import FairQueue, FairShare
from router.flow_control.slo_admission import PredictorAccuracy, SloEstimate
from router.flow_control.types import BATCH, INTERACTIVE, RANKS, STANDARD, FlowItem, Ticket

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
    """Those who wait for the same workers, by tenant and rank; and what is known of them."""

    def __init__(self, now: float, max_queued: int, max_bytes: int) -> None:
        self.shares = FairShare(1 / max(1, max_queued), 1 / max_bytes)
        self.drain = DrainRate()
        self.dispatch_order = DrainRate()
        self.accuracy = PredictorAccuracy()
        self.clock = BusyClock()
        self.transit = Transit()
        self.patience = Patience(now)
        self.num_before_aged = 0
        self.served_at = 0

    @property
    def queues(self) -> dict[int, FairQueue]:
        """By rank."""
        return self.shares.queues

    @property
    def num_waiting(self) -> int:
        """Of all ranks."""
        return self.shares.num_waiting

    @property
    def cost(self) -> float:
        """Tokens of all who wait."""
        return sum(queue.cost for queue in self.queues.values())

    @property
    def top_rank(self) -> int:
        """The highest that waits; somebody does."""
        return next(rank for rank in RANKS if self.queues[rank].num_waiting)

    def wait_s(self, cost: float) -> float | None:
        """Until so many tokens have had their turn; None while nothing is known. Turns tell it sooner than places that come free:
        who is let in leaves only when its answer is whole."""
        waits_s = self.dispatch_order.seconds_for(cost, self.clock.now)
        return self.drain.seconds_for(cost, self.clock.now) if waits_s is None else waits_s

    def tick(self, now: float, *, is_full: bool) -> float:
        """Seconds in which somebody of this lane needed a place."""
        return self.clock.advance(now, busy=is_full or self.num_waiting > 0)

    def outlook(self, item: FlowItem) -> SloEstimate:
        """Of its tenant: who floods does not close the gate to others."""
        return self.shares.outlook(item.tenant, item.rank)


class RequestQueue:
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

    def fits(self, item: FlowItem) -> bool:
        """There is room without anybody making way."""
        return self._is_open(item, OPEN_EIGHTHS[item.rank])

    def holds(self, item: FlowItem) -> bool:
        """There is room in the whole of it: enough for somebody for whom others have made way."""
        return self._is_open(item, 8)

    def _is_open(self, item: FlowItem, open_eighths: int) -> bool:
        num_open = self.max_queued - self.max_queued * (8 - open_eighths) // 8
        bytes_open = self.max_bytes - self.max_bytes * (8 - open_eighths) // 8
        return self.num_queued < num_open and self.num_bytes + item.num_bytes <= bytes_open

    def victim(self, item: FlowItem, weight: float) -> Ticket | None:
        """Who makes way for the newcomer; None: nobody, it is refused."""
        if item.num_bytes > self.max_bytes or not self.max_queued:
            return None
        return self._of_heaviest(item, weight) or self._of_lower_rank(item, weight) or self._own(item)

    def push(self, ticket: Ticket, weight: float, now: float) -> None:
        """The caller has seen to it that it fits."""
        lane = self.lane(ticket.item.lane, now)
        if not lane.num_waiting:
            lane.patience.progress(now)
        lane.shares.push(ticket, weight)
        self._count(ticket, 1)

    def serve(self, ticket: Ticket) -> None:
        """It leaves for a place."""
        self._shares_of(ticket).serve(ticket)
        self._count(ticket, -1)

    def remove(self, ticket: Ticket) -> None:
        """It leaves for nothing."""
        self._shares_of(ticket).remove(ticket)
        self._count(ticket, -1)

    def _shares_of(self, ticket: Ticket) -> FairShare:
        return self.lanes[ticket.item.lane].shares

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.num_queued += sign
        self.num_bytes += sign * ticket.item.num_bytes

    def _load_with(self, item: FlowItem, weight: float) -> float:
        """What its tenant would hold of the room."""
        lane = self.lanes.get(item.lane)
        if lane is None:
            return max(1 / max(1, self.max_queued), item.num_bytes / self.max_bytes) / weight
        share = lane.shares.share(item.tenant, weight)
        return lane.shares.load(share.num_waiting + 1, share.num_bytes + item.num_bytes, weight)

    def _of_heaviest(self, item: FlowItem, weight: float) -> Ticket | None:
        """Of another tenant, that holds more for its weight than the newcomer's would."""
        tops = [(top.load, lane, top) for lane in self.lanes.values() if (top := lane.shares.heaviest()) is not None]
        if not tops:
            return None
        load, lane, top = max(tops, key=lambda found: found[0])
        if top.tenant == item.tenant or load <= self._load_with(item, weight):
            return None
        ranks = (BATCH,) if item.rank == BATCH else (BATCH, STANDARD, INTERACTIVE)
        return next((ticket for rank in ranks if (ticket := lane.queues[rank].newest(top.tenant)) is not None), None)

    def _of_lower_rank(self, item: FlowItem, weight: float) -> Ticket | None:
        """Of a tenant that holds at least as much as the newcomer's would."""
        mine = self._load_with(item, weight)
        for rank in range(BATCH, item.rank, -1):
            for lane in self.lanes.values():
                flow = lane.queues[rank].heaviest()
                if flow is not None and flow.share.load >= mine:
                    return flow.newest()
        return None

    def _own(self, item: FlowItem) -> Ticket | None:
        """Of its own tenant, of a lower rank."""
        lane = self.lanes.get(item.lane)
        ranks = range(BATCH, item.rank, -1) if lane is not None else ()
        found = (lane.queues[rank].newest(item.tenant) for rank in ranks if lane is not None)
        return next((ticket for ticket in found if ticket is not None), None)
