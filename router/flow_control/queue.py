"""Where requests wait for admission: bounded by count and bytes, by rank, fair between tenants. Pure.

A lower rank cannot fill the room: the last quarter is closed to batch, the last eighth to standard. In a full room the tenant
that holds most for its weight makes way for one that holds less, whatever ranks they declare; among equals, and within a tenant,
lower ranks make way for higher ones. The newest request goes, of the lowest rank. Batch pushes nobody out but batch.
"""

import heapq
from collections import deque
from collections.abc import Hashable

from router.flow_control.capacity import AdmissionSettings, InflightLimiter
from router.flow_control.fairness import FairQueue, FairShare
from router.flow_control.slo_admission import (
    BATCH,
    INTERACTIVE,
    RANKS,
    STANDARD,
    BusyClock,
    DrainRate,
    FlowItem,
    Forecast,
    PredictorAccuracy,
    Refusal,
    SloEstimate,
    Ticket,
    TicketState,
    Verdict,
    alone_s,
    deadline_refusal,
    expired,
    never_fast_enough,
    retry_delay_s,
    too_slow,
    verdict,
)

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


# Whose turn it is among those who wait: fair between tenants, by rank, when the forecast is good. Pure.
#
# A request that waits because of its own objective, its tenant's own limit or its rank (batch) is passed;
# one that waits because the mesh is saturated is not, or large prompts would starve behind small ones.


AGED_TURN = 4
"""Of so many places one is for standard requests that have waited for too long beside interactive ones."""
MAX_PASSED = 4
"""How many of a rank are passed in one go, beside those whose tenant has no place: each costs a forecast."""
MAX_BROUGHT_BACK = 2
"""How many of those who wait for their own objective are asked again at each look, before others."""

MAX_WAIT_S = 3600.0
"""Nobody waits for longer, whatever it waits for."""


class DispatchOrder:
    """Admits and refuses those who wait. `decided` collects them; `refuse` ends the wait of one."""

    def __init__(self, settings: AdmissionSettings, room: RequestQueue, limiter: InflightLimiter) -> None:
        self.decided: list[Ticket] = []
        self._settings = settings
        self._room = room
        self._limiter = limiter
        self._num_served = 0
        self._parked: list[tuple[FairQueue, str]] = []
        self._aside: deque[tuple[FairQueue, Ticket]] = deque()
        self._expiries: list[tuple[float, int, Ticket]] = []

    def take(self, now: float) -> None:
        """Everybody who may go now, and those who are too late."""
        self._expire(now)
        self._bring_back()
        while self._room.num_queued and not self._limiter.is_full:
            ticket = self._first(now)
            if ticket is None:
                return
            self._admit(ticket, now)

    def refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        """It has waited in vain."""
        ticket.refusal = refusal
        self._room.remove(ticket)
        self._limiter.refuse(ticket, refusal.reason)
        self.decided.append(ticket)

    def way(self, lane: Lane, item: FlowItem, forecast: Forecast | None, now: float) -> Verdict:
        """Who would be alone is let in."""
        if not self._limiter.num_in_lane(item.lane, BATCH + 1):
            return Verdict.OPEN
        others_above = self._limiter.num_in_lane(item.lane, BATCH) > 0
        return verdict(item, forecast, others_above=others_above, transit_s=lane.transit.seconds(now))

    def too_late(
        self, lane: Lane, item: FlowItem, forecast: Forecast | None, wait_s: float | None, now: float, waited_s: float = 0.0
    ) -> Refusal | None:
        """Its deadline counts always, its objective unless it would be alone. `wait_s`: from now on; None: it is placed now."""
        refusal = deadline_refusal(item, forecast, wait_s, now)
        if refusal is not None or not self._limiter.num_in_lane(item.lane, BATCH + 1):
            return refusal
        return never_fast_enough(item, forecast) or lane.outlook(item).refusal(
            item, forecast, wait_s, waited_s, self._margin(lane, item, wait_s, now)
        )

    def _margin(self, lane: Lane, item: FlowItem, wait_s: float | None, now: float) -> float:
        """For whom there is a place while nobody waits, and for whom its tenant is below its share, what is expected counts, not
        what is feared: in the first case nobody else would take the place, in the second the fear comes of others."""
        is_contended = wait_s is not None or lane.num_waiting > 0
        return lane.accuracy.margin(now) if is_contended and not lane.shares.is_owed(item.tenant) else 1.0

    def note_latest_start(self, ticket: Ticket, forecast: Forecast | None) -> None:
        """When it will be too late for it, at the latest when it has waited for MAX_WAIT_S. Without a forecast nobody is taken to
        miss an objective, but a deadline is a deadline."""
        item, ends = ticket.item, [ticket.arrived + MAX_WAIT_S]
        needed_s = 0.0 if forecast is None else alone_s(forecast)
        if item.ttft_s is not None and forecast is not None:
            ends.append(ticket.arrived + item.ttft_s - needed_s)
        if item.deadline is not None:
            ends.append(item.deadline - needed_s)
        heapq.heappush(self._expiries, (min(ends), ticket.number, ticket))

    def _expire(self, now: float) -> None:
        while self._expiries and (self._expiries[0][0] < now or self._expiries[0][2].state is not TicketState.WAITING):
            ticket = heapq.heappop(self._expiries)[2]
            if ticket.state is TicketState.WAITING:
                lane = self._room.lanes[ticket.item.lane]
                delay_s = retry_delay_s(lane.drain.seconds_for(lane.cost, lane.clock.now))
                self.refuse(ticket, expired(ticket.item, now - ticket.arrived, now, delay_s))
        if len(self._expiries) > 2 * self._room.num_queued + 64:
            self._expiries = [entry for entry in self._expiries if entry[2].state is TicketState.WAITING]
            heapq.heapify(self._expiries)

    def _first(self, now: float) -> Ticket | None:
        """Of the lane whose latest place is longest ago: a rank counts within its lane, but for batch."""
        lanes = [lane for lane in self._room.lanes.values() if lane.num_waiting]
        for lane in sorted(lanes, key=lambda lane: (lane.top_rank == BATCH, lane.served_at)):
            ticket = self._first_of(lane, now)
            if ticket is not None:
                return ticket
        return None

    def _first_of(self, lane: Lane, now: float) -> Ticket | None:
        """Who of this lane may go. In each queue not many are asked in vain; at the next look it goes on after them."""
        ranks, num_passed = self._in_order(lane, now), dict.fromkeys(RANKS, 0)
        while (queue := lane.shares.first(ranks)) is not None and (ticket := queue.head()) is not None:
            rank = ticket.item.rank
            if not self._limiter.within_limit(ticket.item.tenant):
                self._park(queue, ticket)
                continue
            forecast, waited_s = ticket.item.foresee(), now - ticket.arrived
            refusal = self.too_late(lane, ticket.item, forecast, None, now, waited_s)
            if refusal is not None:
                self.refuse(ticket, refusal)
                continue
            its_way = self.way(lane, ticket.item, forecast, now)
            if its_way is Verdict.OPEN or lane.patience.is_over(now, self._settings.hold_timeout_s):
                lane.transit.enter(ticket.number, 0.0 if forecast is None else alone_s(forecast), now)
                return ticket
            if its_way is Verdict.SATURATED:
                return None
            self._pass(queue, ticket, forecast, waited_s)
            num_passed[rank] += 1
            if num_passed[rank] > MAX_PASSED:
                ranks.remove(rank)
        return None

    def _pass(self, queue: FairQueue, ticket: Ticket, forecast: Forecast | None, waited_s: float) -> None:
        """It waits for something of its own: for its objective only so long, and beside its tenant's others."""
        refusal = too_slow(ticket.item, forecast)
        if refusal is None:
            self._park(queue, ticket)
        elif waited_s >= self._settings.hold_timeout_s:
            self.refuse(ticket, refusal)
        else:
            queue.set_aside(ticket)
            self._aside.append((queue, ticket))

    def _park(self, queue: FairQueue, ticket: Ticket) -> None:
        queue.park(ticket.item.tenant)
        self._parked.append((queue, ticket.item.tenant))

    def _bring_back(self) -> None:
        """Whole tenants, and some of those set aside, so that others are asked, too."""
        parked, self._parked = self._parked, []
        for queue, tenant in parked:
            queue.unpark(tenant)
        num = 0
        while self._aside and num < MAX_BROUGHT_BACK:
            queue, ticket = self._aside.popleft()
            if ticket.state is TicketState.WAITING:
                queue.bring_back(ticket)
                num += 1

    def _in_order(self, lane: Lane, now: float) -> list[int]:
        aged = lane.queues[STANDARD].head() if self._settings.aging_s else None
        if aged is not None and now - aged.arrived >= self._settings.aging_s and lane.num_before_aged >= AGED_TURN - 1:
            return [STANDARD, INTERACTIVE, BATCH]
        return [INTERACTIVE, STANDARD, BATCH]

    def _admit(self, ticket: Ticket, now: float) -> None:
        lane, rank = self._room.lanes[ticket.item.lane], ticket.item.rank
        if rank == STANDARD:
            lane.num_before_aged = 0
        elif rank == INTERACTIVE and lane.queues[STANDARD].num_waiting:
            lane.num_before_aged += 1
        self._num_served += 1
        lane.served_at = self._num_served
        lane.patience.progress(now)
        lane.dispatch_order.record(lane.tick(now, is_full=self._limiter.is_full), ticket.item.cost)
        self._room.serve(ticket)
        self._limiter.admit(ticket)
        self.decided.append(ticket)
