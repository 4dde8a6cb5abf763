"""Whose turn it is among those who wait: fair between tenants, by rank, when the forecast is good. Pure.

A request that waits because of its own objective, its tenant's own limit or its rank (batch) is passed;
one that waits because the mesh is saturated is not, or large prompts would starve behind small ones.
"""

import heapq
from collections import deque

from router.flow_control.capacity import AdmissionSettings, InflightLimiter, retry_delay_s
from router.flow_control.fairness import FairQueue
from router.flow_control.queue import Lane, RequestQueue
from router.flow_control.slo_admission import Verdict, alone_s, deadline_refusal, expired, never_fast_enough, too_slow, verdict
from router.flow_control.types import BATCH, INTERACTIVE, RANKS, STANDARD, FlowItem, Forecast, Refusal, Ticket, TicketState

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
