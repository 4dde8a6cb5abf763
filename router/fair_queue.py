"""A queue in which tenants share by weight: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). Pure.

Every tenant has a virtual start: the tokens that it was given, divided by its weight. The one with the earliest is served next,
so that whoever has a backlog gets its share however many requests another one sends. Who comes back after a pause starts at the
present virtual time: a pause earns nothing.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from router.applicant import Ticket, TicketState
from router.foresight import Outlook

MAX_IDLE_FLOWS = 1024


@dataclass(eq=False)
class Flow:
    """One tenant's part of the queue. `tickets` may hold some that wait no more: they are skipped."""

    tenant: str
    weight: float
    start: float
    tickets: deque[Ticket] = field(default_factory=deque)
    num_waiting: int = 0
    num_bytes: int = 0
    cost: float = 0.0
    parked: bool = False  # waits for something of its own, not for its turn
    outlook: Outlook = field(default_factory=Outlook)
    load: float = 0.0  # what it holds of the room, for its weight

    def head(self) -> Ticket | None:
        """The oldest that waits."""
        while self.tickets and self.tickets[0].state is not TicketState.WAITING:
            self.tickets.popleft()
        return self.tickets[0] if self.tickets else None

    def newest(self) -> Ticket | None:
        """The latest that waits."""
        while self.tickets and self.tickets[-1].state is not TicketState.WAITING:
            self.tickets.pop()
        return self.tickets[-1] if self.tickets else None


class FairQueue:
    """Tickets of one lane and rank. `per_request` and `per_byte`: what one takes of the room, whose whole is 1."""

    def __init__(self, per_request: float, per_byte: float) -> None:
        self._per_request = per_request
        self._per_byte = per_byte
        self._heaviest: list[tuple[float, int, Flow]] = []
        self.num_waiting = 0
        self.num_bytes = 0
        self.cost = 0.0
        self.weight = 0.0  # of all who wait
        self._virtual = 0.0
        self._flows: dict[str, Flow] = {}
        self._heap: list[tuple[float, int, Flow]] = []
        self._entries = 0

    def load(self, num: int, num_bytes: int, weight: float) -> float:
        """What so many requests, or so many bytes, are of the room, for their weight."""
        return max(num * self._per_request, num_bytes * self._per_byte) / weight

    def heaviest(self) -> Flow | None:
        """Of the tenant who holds most for its weight; None when nobody waits."""
        while self._heaviest:
            load, _, flow = self._heaviest[0]
            if flow.num_waiting and -load == flow.load:
                return flow
            heapq.heappop(self._heaviest)
            if flow.num_waiting:
                self._weigh(flow)  # it was heavier once
        return None

    def flow(self, tenant: str, weight: float) -> Flow:
        """The tenant's, made if there is none; a new weight holds from here on."""
        flow = self._flows.get(tenant)
        if flow is None:
            self._forget_idle()
            flow = self._flows[tenant] = Flow(tenant, weight, self._virtual)
        if flow.num_waiting:
            self.weight += weight - flow.weight
        flow.weight = weight
        return flow

    def outlook(self, tenant: str) -> Outlook:
        """Whether the tenant is being refused at present; of one that is not known, not."""
        flow = self._flows.get(tenant)
        return Outlook() if flow is None else flow.outlook

    def push(self, ticket: Ticket, weight: float) -> None:
        """Wait behind the tenant's own."""
        flow = self.flow(ticket.applicant.tenant, weight)
        flow.tickets.append(ticket)
        self._count(flow, ticket, 1)
        if flow.num_waiting == 1:
            self.weight += flow.weight
            self._move(flow, max(self._virtual, flow.start))

    def head(self) -> Ticket | None:
        """Whose turn it is; None when nobody waits for a turn. It stays until `remove` or `serve`."""
        while self._heap:
            start, _, flow = self._heap[0]
            if start == flow.start and not flow.parked and flow.num_waiting:
                return flow.head()
            heapq.heappop(self._heap)  # the flow has another entry, or needs none
        return None

    def serve(self, ticket: Ticket) -> None:
        """It was its turn and it goes: its tenant is charged."""
        self.charge(ticket.applicant.tenant, self._flows[ticket.applicant.tenant].weight, ticket.applicant.cost)
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """It waits no more; the caller changes its state. What the tenant was charged stays as it is."""
        flow = self._flows[ticket.applicant.tenant]
        self._count(flow, ticket, -1)
        if not flow.num_waiting:
            self.weight = self.weight - flow.weight if self.num_waiting else 0.0  # rounding errors are not carried along
            flow.tickets.clear()
        elif len(flow.tickets) > 2 * flow.num_waiting + 16:
            flow.tickets = deque(old for old in flow.tickets if old.state is TicketState.WAITING and old is not ticket)

    def charge(self, tenant: str, weight: float, cost: float) -> None:
        """The tenant was given `cost` tokens, also past the queue."""
        flow = self.flow(tenant, weight)
        begin = max(self._virtual, flow.start)
        if not flow.parked:
            self._virtual = self._first_start(begin)
        self._move(flow, begin + cost / flow.weight)

    def settle(self, tenant: str, extra: float) -> None:
        """It took `extra` tokens more (negative: fewer) than it was charged."""
        flow = self._flows.get(tenant)
        if flow is not None:
            self._move(flow, max(self._virtual, flow.start + extra / flow.weight))

    def park(self, tenant: str) -> None:
        """The tenant waits for something of its own; others go on."""
        if tenant in self._flows:
            self._flows[tenant].parked = True

    def unpark(self, tenant: str) -> None:
        """It takes part again."""
        flow = self._flows.get(tenant)
        if flow is not None and flow.parked:
            flow.parked = False
            self._move(flow, max(self._virtual, flow.start))

    def _first_start(self, begin: float) -> float:
        """Virtual time is the start of what is in service: it never goes back, nor beyond the earliest who waits."""
        head = self.head()
        if head is None:
            return max(self._virtual, begin)
        return max(self._virtual, min(begin, self._flows[head.applicant.tenant].start))

    def _count(self, flow: Flow, ticket: Ticket, sign: int) -> None:
        applicant = ticket.applicant
        for counted in (self, flow):
            counted.num_waiting += sign
            counted.num_bytes += sign * applicant.num_bytes
            counted.cost += sign * applicant.cost
        flow.load = self.load(flow.num_waiting, flow.num_bytes, flow.weight)
        if sign > 0:
            self._weigh(flow)

    def _weigh(self, flow: Flow) -> None:
        self._entries += 1
        heapq.heappush(self._heaviest, (-flow.load, self._entries, flow))
        if len(self._heaviest) > 4 * self.num_waiting + 64:
            waiting = (other for other in self._flows.values() if other.num_waiting)
            self._heaviest = [(-other.load, number, other) for number, other in enumerate(waiting)]
            heapq.heapify(self._heaviest)

    def _move(self, flow: Flow, start: float) -> None:
        """Its old entry in the heap is void from here on."""
        flow.start = start
        if flow.num_waiting and not flow.parked:
            self._entries += 1
            heapq.heappush(self._heap, (start, self._entries, flow))
            if len(self._heap) > 4 * len(self._flows) + 64:
                waiting = (other for other in self._flows.values() if other.num_waiting and not other.parked)
                self._heap = [(other.start, number, other) for number, other in enumerate(waiting)]
                heapq.heapify(self._heap)

    def _forget_idle(self) -> None:
        """Who waits for nothing and is not ahead of others needs no memory; beyond the bound nobody idle is remembered."""
        if len(self._flows) < MAX_IDLE_FLOWS + self.num_waiting:
            return
        idle = [flow for flow in self._flows.values() if not flow.num_waiting]
        passed = [flow for flow in idle if flow.start <= self._virtual]
        for flow in passed or idle:
            del self._flows[flow.tenant]
