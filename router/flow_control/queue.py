"""The request queue, in which requests wait for admission, bounded by count and bytes, and the order in which they are
dispatched. Pure.

A lower rank cannot fill the queue: the last quarter is closed to batch, the last eighth to standard. In a full queue the tenant
that holds most for its weight loses a request to one that holds less, whatever ranks they declare; among equal tenants, and
within a tenant, lower ranks lose to higher ones, and lower hints of a rank to higher ones. Of the lowest rank, the request with
the lowest hint is evicted, the newest among equals. Batch evicts only batch.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable

from pdmesh.step_sharing import MUCH_SHORTER
from router.flow_control.capacity import AdmissionSettings, BusyClock, DrainRate, InflightLimiter
from router.flow_control.fairness import FairQueue, FairShare
from router.flow_control.slo_admission import (
    BATCH,
    HOPELESS,
    INTERACTIVE,
    RANKS,
    STANDARD,
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
    """Bound how long a lane believes forecasts that hold it back while nothing moves. A worker that hangs, or reports nothing
    new, must not block it for ever: after `timeout_s` one request goes by count alone, after another `timeout_s` two, then
    four."""

    def __init__(self, now: float) -> None:
        self._progress_at = now
        self._next_allowance = 1
        self._allowance = 0

    def progress(self, now: float) -> None:
        """Record that a request was admitted by its forecast, or that the first one began to wait."""
        self._progress_at = now

    def moved(self, now: float) -> None:
        """Record that a slot came free: the mesh works."""
        self._progress_at = now
        self._next_allowance, self._allowance = 1, 0

    def is_over(self, now: float, timeout_s: float) -> bool:
        """Return whether one request may go whatever its forecast says, and use that permission up."""
        if now - self._progress_at >= timeout_s:
            self._progress_at = now
            self._allowance, self._next_allowance = self._next_allowance, 2 * self._next_allowance
        if not self._allowance:
            return False
        self._allowance -= 1
        return True


class Transit:
    """Hold admitted prompts that have not reached a worker: no forecast contains them yet."""

    def __init__(self) -> None:
        self._under_way: dict[int, tuple[float, float]] = {}

    def enter(self, number: int, seconds: float, now: float) -> None:
        """Add the admitted ticket with this number; its prompt takes `seconds`."""
        self._under_way[number] = (now + MAX_TRANSIT_S, seconds)

    def leave(self, number: int) -> None:
        """Remove a ticket that was sent to a worker, or given up; idempotent."""
        self._under_way.pop(number, None)

    def seconds(self, now: float) -> float:
        """Return the time of all prompts in transit. One that takes longer than MAX_TRANSIT_S waits for something else, and is
        dropped."""
        while self._under_way:
            number = next(iter(self._under_way))
            if self._under_way[number][0] > now:
                break
            del self._under_way[number]
        return sum(seconds for _, seconds in self._under_way.values())


class Lane:
    """Hold the requests that wait for the same workers, by tenant and rank, with what is known about those workers."""

    def __init__(self, now: float, max_queued: int, max_bytes: int) -> None:
        self.shares = FairShare(1 / max(1, max_queued), 1 / max_bytes)
        self.drain = DrainRate()
        self.drain_rate = DrainRate()
        self.accuracy = PredictorAccuracy()
        self.clock = BusyClock()
        self.transit = Transit()
        self.patience = Patience(now)
        self.num_before_aged = 0
        self.served_at = 0
        self._by_length: list[tuple[int, int, Ticket]] = []

    def push(self, ticket: Ticket, weight: float) -> None:
        """Append a ticket to its tenant's."""
        self.shares.push(ticket, weight)
        heapq.heappush(self._by_length, (ticket.item.prompt_tokens, ticket.number, ticket))
        if len(self._by_length) > 2 * self.num_waiting + 64:
            self._by_length = [entry for entry in self._by_length if entry[2].state is TicketState.WAITING]
            heapq.heapify(self._by_length)

    def shortest(self) -> Ticket | None:
        """Return the waiting ticket with the shortest prompt, the oldest of equal ones."""
        while self._by_length and self._by_length[0][2].state is not TicketState.WAITING:
            heapq.heappop(self._by_length)
        return self._by_length[0][2] if self._by_length else None

    @property
    def queues(self) -> dict[int, FairQueue]:
        """Return the queues by rank."""
        return self.shares.queues

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting requests of all ranks."""
        return self.shares.num_waiting

    @property
    def cost(self) -> float:
        """Return the tokens of all waiting requests."""
        return sum(queue.cost for queue in self.queues.values())

    @property
    def top_rank(self) -> int:
        """Return the highest rank that waits; some request must wait."""
        return next(rank for rank in RANKS if self.queues[rank].num_waiting)

    def wait_s(self, cost: float) -> float | None:
        """Return the seconds until `cost` tokens have been admitted; None while nothing is known. The rate of admissions reacts
        sooner than that of releases: a request is released only at the end of its response."""
        waits_s = self.drain_rate.seconds_for(cost, self.clock.now)
        return self.drain.seconds_for(cost, self.clock.now) if waits_s is None else waits_s

    def tick(self, now: float, *, is_full: bool) -> float:
        """Return the clock of this lane: seconds in which some request needed a slot."""
        return self.clock.advance(now, busy=is_full or self.num_waiting > 0)

    def outlook(self, item: FlowItem) -> SloEstimate:
        """Return the estimate of the item's tenant, so that one tenant's flood does not close the lane to others."""
        return self.shares.outlook(item.tenant, item.rank)


class RequestQueue:
    """Hold all lanes of one router."""

    def __init__(self, max_queued: int, max_bytes: int) -> None:
        self.max_queued = max_queued
        self.max_bytes = max_bytes
        self.num_queued = 0
        self.num_bytes = 0
        self.lanes: dict[Hashable, Lane] = {}

    def lane(self, key: Hashable, now: float) -> Lane:
        """Return the lane of that name, which is made when it is new."""
        if key not in self.lanes:
            if len(self.lanes) >= MAX_LANES:
                self.lanes = {name: lane for name, lane in self.lanes.items() if lane.num_waiting}
            self.lanes[key] = Lane(now, self.max_queued, self.max_bytes)
        return self.lanes[key]

    def fits(self, item: FlowItem) -> bool:
        """Return whether there is room without an eviction."""
        return self._is_open(item, OPEN_EIGHTHS[item.rank])

    def holds(self, item: FlowItem) -> bool:
        """Return whether the whole queue has room, including the part closed to its rank: enough for a request that evicted
        another."""
        return self._is_open(item, 8)

    def _is_open(self, item: FlowItem, open_eighths: int) -> bool:
        num_open = self.max_queued - self.max_queued * (8 - open_eighths) // 8
        bytes_open = self.max_bytes - self.max_bytes * (8 - open_eighths) // 8
        return self.num_queued < num_open and self.num_bytes + item.num_bytes <= bytes_open

    def victim(self, item: FlowItem, weight: float) -> Ticket | None:
        """Return the ticket that is evicted for a new item; None: there is none, and the item is refused."""
        if item.num_bytes > self.max_bytes or not self.max_queued:
            return None
        return self._of_heaviest(item, weight) or self._of_lower_rank(item, weight) or self._own(item)

    def push(self, ticket: Ticket, weight: float, now: float) -> None:
        """Append a ticket; the caller has checked that it fits."""
        lane = self.lane(ticket.item.lane, now)
        if not lane.num_waiting:
            lane.patience.progress(now)
        lane.push(ticket, weight)
        self._count(ticket, 1)

    def serve(self, ticket: Ticket) -> None:
        """Remove a ticket that is admitted."""
        self._shares_of(ticket).serve(ticket)
        self._count(ticket, -1)

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket that is not admitted."""
        self._shares_of(ticket).remove(ticket)
        self._count(ticket, -1)

    def _shares_of(self, ticket: Ticket) -> FairShare:
        return self.lanes[ticket.item.lane].shares

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.num_queued += sign
        self.num_bytes += sign * ticket.item.num_bytes

    def _load_with(self, item: FlowItem, weight: float) -> float:
        """Return the load that the item's tenant would have with it."""
        lane = self.lanes.get(item.lane)
        if lane is None:
            return max(1 / max(1, self.max_queued), item.num_bytes / self.max_bytes) / weight
        share = lane.shares.share(item.tenant, weight)
        return lane.shares.load(share.num_waiting + 1, share.num_bytes + item.num_bytes, weight)

    def _of_heaviest(self, item: FlowItem, weight: float) -> Ticket | None:
        """Return a ticket of another tenant that holds more, for its weight, than the item's tenant would."""
        tops = [(top.load, lane, top) for lane in self.lanes.values() if (top := lane.shares.heaviest()) is not None]
        if not tops:
            return None
        load, lane, top = max(tops, key=lambda found: found[0])
        if top.tenant == item.tenant or load <= self._load_with(item, weight):
            return None
        ranks = (BATCH,) if item.rank == BATCH else (BATCH, STANDARD, INTERACTIVE)
        return next((ticket for rank in ranks if (ticket := lane.queues[rank].last(top.tenant)) is not None), None)

    def _of_lower_rank(self, item: FlowItem, weight: float) -> Ticket | None:
        """Return a ticket of lower rank, of a tenant that holds at least as much as the item's tenant would."""
        mine = self._load_with(item, weight)
        for rank in range(BATCH, item.rank, -1):
            for lane in self.lanes.values():
                flow = lane.queues[rank].heaviest()
                if flow is not None and flow.share.load >= mine:
                    return flow.last()
        return None

    def _own(self, item: FlowItem) -> Ticket | None:
        """Return a ticket of the item's own tenant, of a lower rank, or of its rank with a lower hint."""
        lane = self.lanes.get(item.lane)
        for rank in range(BATCH, item.rank - 1, -1) if lane is not None else ():
            ticket = lane.queues[rank].last(item.tenant) if lane is not None else None
            if ticket is not None and (rank > item.rank or ticket.item.hint < item.hint):
                return ticket
        return None


# The order of dispatch: fair between tenants, by rank, when the forecast is good.
#
# A request that waits because of its own objective, its tenant's limit or its rank (batch) is passed over. One that waits because
# the mesh is saturated is overtaken only by requests with much shorter prompts, which share the steps of the long ones that
# workers compute, and only by as many tokens as its own prompt has: a long prompt waits at most twice as long.

AGED_TURN = 4
"""Of this many admissions, one goes to a standard request that has waited too long behind interactive ones."""
MAX_PASSED = 4
"""The number of requests of a rank that are passed over in one look, beside those whose tenant is at its limit: each costs a
forecast."""
MAX_BROUGHT_BACK = 2
"""The number of requests waiting for their own objective that are tried again at each look, before others."""

MAX_WAIT_S = 3600.0
"""No request waits longer than this."""


class DispatchOrder:
    """Admit and refuse waiting tickets. `decided` collects them; `refuse` ends the wait of one."""

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
        """Admit every ticket that may start now, and refuse those that are too late."""
        self._expire(now)
        self._bring_back()
        while self._room.num_queued and not self._limiter.is_full:
            ticket = self._first(now)
            if ticket is None:
                return
            self._admit(ticket, now)

    def refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        """Refuse a waiting ticket."""
        ticket.refusal = refusal
        self._room.remove(ticket)
        self._limiter.refuse(ticket, refusal.reason)
        self.decided.append(ticket)

    def _refuse_late(self, ticket: Ticket, lane: Lane, forecast: Forecast | None, refusal: Refusal, now: float) -> None:
        """Refuse a ticket whose turn it is. Where it has waited for nothing, its forecast was too good; batch has none, and a
        TPOT that no worker can keep says nothing of waits."""
        item = ticket.item
        is_late = refusal.reason == "objective" and never_fast_enough(item, forecast) is None and item.rank != BATCH
        if is_late and ticket.expected_s is not None and item.ttft_s is not None:
            lane.accuracy.observe(ticket.expected_s, math.inf, item.ttft_s, now)
        self.refuse(ticket, refusal)

    def way(self, lane: Lane, item: FlowItem, forecast: Forecast | None, now: float) -> Verdict:
        """Return the verdict on a new or waiting item. It is OPEN when nothing else is in flight in the lane."""
        if not self._limiter.num_in_lane(item.lane, BATCH + 1):
            return Verdict.OPEN
        others_above = self._limiter.num_in_lane(item.lane, BATCH) > 0
        return verdict(item, forecast, others_above=others_above, transit_s=lane.transit.seconds(now))

    def too_late(
        self, lane: Lane, item: FlowItem, forecast: Forecast | None, wait_s: float | None, now: float, waited_s: float = 0.0
    ) -> Refusal | None:
        """Return a refusal if the item is too late. Its deadline always counts; its objective only while the lane has other
        requests in flight. `wait_s`: expected wait from now on; None: it is placed now."""
        refusal = deadline_refusal(item, forecast, wait_s, now)
        if refusal is not None or not self._limiter.num_in_lane(item.lane, BATCH + 1):
            return refusal
        return never_fast_enough(item, forecast) or lane.outlook(item).refusal(
            item, forecast, wait_s, waited_s, self._margin(lane, item, wait_s, now)
        )

    def _margin(self, lane: Lane, item: FlowItem, wait_s: float | None, now: float) -> float:
        """Return the safety factor on the forecast. It is 1 where a slot is free and nothing waits, since no other request would
        take the slot, and for a tenant below its share, since other tenants cause the uncertainty."""
        is_contended = wait_s is not None or lane.num_waiting > 0
        return lane.accuracy.margin(now) if is_contended and not lane.shares.is_owed(item.tenant) else 1.0

    def note_latest_start(self, ticket: Ticket, forecast: Forecast | None) -> None:
        """Record when it will be too late for the ticket, at most MAX_WAIT_S after its arrival. Without a forecast only its
        deadline counts, not its objective."""
        item, ends = ticket.item, [ticket.arrived + MAX_WAIT_S]
        needed_s = 0.0 if forecast is None else alone_s(forecast)
        if item.ttft_s is not None and forecast is not None:
            ends.append(ticket.arrived + HOPELESS * item.ttft_s - needed_s)
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
        """Return the next ticket of the lane that was served longest ago. Rank counts within a lane, except that lanes with only
        batch come last."""
        lanes = [lane for lane in self._room.lanes.values() if lane.num_waiting]
        for lane in sorted(lanes, key=lambda lane: (lane.top_rank == BATCH, lane.served_at)):
            ticket = self._first_of(lane, now)
            if ticket is not None:
                return ticket
        return None

    def _first_of(self, lane: Lane, now: float) -> Ticket | None:
        """Return the ticket of this lane that may start. In each queue few are tried in vain; the next look continues after
        them."""
        ranks, num_passed = self._in_order(lane, now), dict.fromkeys(RANKS, 0)
        while (queue := lane.shares.first(ranks)) is not None and (ticket := queue.head()) is not None:
            rank = ticket.item.rank
            if not self._limiter.within_limit(ticket.item.tenant):
                self._park(queue, ticket)
                continue
            forecast, waited_s = ticket.item.foresee(), now - ticket.arrived
            refusal = self.too_late(lane, ticket.item, forecast, None, now, waited_s)
            if refusal is not None:
                self._refuse_late(ticket, lane, forecast, refusal, now)
                continue
            its_way = self.way(lane, ticket.item, forecast, now)
            if its_way is Verdict.OPEN or lane.patience.is_over(now, self._settings.hold_timeout_s):
                lane.transit.enter(ticket.number, 0.0 if forecast is None else alone_s(forecast), now)
                return ticket
            if its_way is Verdict.SATURATED:
                return self._overtaking(lane, ticket, now)
            self._pass(queue, ticket, forecast, waited_s)
            num_passed[rank] += 1
            if num_passed[rank] > MAX_PASSED:
                ranks.remove(rank)
        return None

    def may_overtake(self, lane: Lane, item: FlowItem) -> bool:
        """Return whether a new item is short enough to go before all that wait."""
        queue = lane.shares.first(RANKS)
        head = None if queue is None else queue.head()
        return head is not None and self._is_much_shorter(item, head)

    def overtakes(self, lane: Lane, item: FlowItem, forecast: Forecast | None, now: float) -> bool:
        """Return whether a new item that may overtake does so by its forecast; then the first that waits is charged."""
        if self.way(lane, item, forecast, now) is not Verdict.OPEN or self.too_late(lane, item, forecast, None, now) is not None:
            return False
        queue = lane.shares.first(RANKS)
        head = None if queue is None else queue.head()
        assert head is not None, "it was asked before"
        head.overtaken_tokens += item.prompt_tokens
        return True

    def _overtaking(self, lane: Lane, head: Ticket, now: float) -> Ticket | None:
        """Return the ticket that goes before `head`, for which the mesh is saturated; None: there is none."""
        ticket = lane.shortest()
        if ticket is None or not self._is_much_shorter(ticket.item, head):
            return None
        forecast = ticket.item.foresee()
        if self.way(lane, ticket.item, forecast, now) is not Verdict.OPEN:
            return None
        if self.too_late(lane, ticket.item, forecast, None, now, now - ticket.arrived) is not None:
            return None  # it is refused in its turn
        head.overtaken_tokens += ticket.item.prompt_tokens
        lane.transit.enter(ticket.number, 0.0 if forecast is None else alone_s(forecast), now)
        return ticket

    def _is_much_shorter(self, item: FlowItem, head: Ticket) -> bool:
        tokens, most = item.prompt_tokens, head.item.prompt_tokens
        if tokens > MUCH_SHORTER * most or head.overtaken_tokens + tokens > most:
            return False
        if (item.tenant, item.rank) == (head.item.tenant, head.item.rank) and item.hint < head.item.hint:
            return False
        return item.rank <= head.item.rank and self._limiter.within_limit(item.tenant)

    def _pass(self, queue: FairQueue, ticket: Ticket, forecast: Forecast | None, waited_s: float) -> None:
        """Pass over a ticket that waits because of its own limits. For its objective it waits a bounded time, and its tenant's
        other tickets go on."""
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
        """Bring back blocked tenants and some of the tickets set aside, so that later tickets are tried, too."""
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
        lane.drain_rate.record(lane.tick(now, is_full=self._limiter.is_full), ticket.item.cost)
        self._room.serve(ticket)
        self._limiter.admit(ticket)
        self.decided.append(ticket)
