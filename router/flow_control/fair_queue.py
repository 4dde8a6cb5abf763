"""Those of one lane and rank who wait, by tenant: the tenant that was given least for its weight is the head. Pure."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router.flow_control.heaviest import Heaviest
from router.flow_control.recent_use import Use
from router.flow_control.slo_admission import Outlook
from router.flow_control.types import Ticket, TicketState


@dataclass(eq=False)
class Share:
    """One tenant's in one lane, whatever ranks it declares. `start`: the tokens that it was given, for its weight."""

    tenant: str
    weight: float
    start: float
    num_waiting: int = 0
    num_bytes: int = 0
    load: float = 0.0  # what it holds of the room, for its weight
    outlooks: dict[int, Outlook] = field(default_factory=dict)
    recent: Use = field(default_factory=Use)


@dataclass(eq=False)
class Flow:
    """One tenant's part of a queue. `resumed`: those whose clients have tokens already. `aside`: those who wait for something of
    their own. All three may hold some that wait no more: they are skipped."""

    share: Share
    tickets: deque[Ticket] = field(default_factory=deque)
    resumed: deque[Ticket] = field(default_factory=deque)
    aside: deque[Ticket] = field(default_factory=deque)
    num_waiting: int = 0
    num_bytes: int = 0
    cost: float = 0.0
    load: float = 0.0
    parked: bool = False  # the whole tenant waits for something of its own
    resumed_is_next: bool = True

    def head(self) -> Ticket | None:
        """Whose turn it is: the oldest, in turn of those who continue and of the others."""
        for line in (self.tickets, self.resumed):
            while line and line[0].state is not TicketState.WAITING:
                line.popleft()
        line = self.resumed if self.resumed and (self.resumed_is_next or not self.tickets) else self.tickets
        return line[0] if line else None

    def newest(self) -> Ticket | None:
        """The latest that waits."""
        waiting = []
        for line in (self.tickets, self.resumed, self.aside):
            while line and line[-1].state is not TicketState.WAITING:
                line.pop()
            waiting += [line[-1]] if line else []
        return max(waiting, key=lambda ticket: ticket.number, default=None)

    def line_of(self, ticket: Ticket) -> deque[Ticket]:
        """Where it waits for its turn."""
        return self.resumed if ticket.applicant.started else self.tickets

    def tidy(self, gone: Ticket) -> None:
        """Not many who wait no more are kept; `gone` is about to be one of them."""
        if not self.num_waiting:
            for line in (self.tickets, self.resumed, self.aside):
                line.clear()
        elif len(self.tickets) + len(self.resumed) + len(self.aside) > 2 * self.num_waiting + 16:
            self.tickets, self.resumed, self.aside = (
                deque(old for old in line if old.state is TicketState.WAITING and old is not gone)
                for line in (self.tickets, self.resumed, self.aside)
            )


class FairQueue:
    """Tickets of one lane and rank. `load`: what so many requests and bytes are of the room, for a weight."""

    def __init__(self, load: Callable[[int, int, float], float]) -> None:
        self._load = load
        self.num_waiting = 0
        self.cost = 0.0
        self._heaviest: Heaviest[Flow] = Heaviest()
        self._flows: dict[str, Flow] = {}
        self._heap: list[tuple[float, int, Flow]] = []
        self._entries = 0

    def heaviest(self) -> Flow | None:
        """Of the tenant that holds most of this queue for its weight; None when nobody waits."""
        return self._heaviest.top()

    def flow(self, tenant: str) -> Flow | None:
        """The tenant's, if it waits here."""
        return self._flows.get(tenant)

    def newest(self, tenant: str) -> Ticket | None:
        """The tenant's latest that waits here."""
        flow = self._flows.get(tenant)
        return None if flow is None else flow.newest()

    def push(self, ticket: Ticket, share: Share) -> None:
        """Wait behind the tenant's own."""
        flow = self._flows.get(share.tenant)
        if flow is None:
            flow = self._flows[share.tenant] = Flow(share)
        flow.line_of(ticket).append(ticket)
        self._count(flow, ticket, 1)
        self._heaviest.weigh(flow)
        self._enter(flow)

    def head(self) -> Ticket | None:
        """Whose turn it is; None when nobody waits for a turn. It stays until `remove`, `set_aside` or `park`."""
        while self._heap:
            start, _, flow = self._heap[0]
            if start == flow.share.start and not flow.parked and flow.num_waiting:
                ticket = flow.head()
                if ticket is not None:
                    return ticket
            heapq.heappop(self._heap)  # the flow has another entry, or needs none
        return None

    def remove(self, ticket: Ticket, *, served: bool = False) -> None:
        """It waits no more; the caller changes its state. `served`: it was its turn."""
        flow = self._flows[ticket.applicant.tenant]
        self._count(flow, ticket, -1)
        if served:
            flow.resumed_is_next = not ticket.applicant.started
        flow.tidy(ticket)
        if not flow.num_waiting:
            del self._flows[ticket.applicant.tenant]

    def moved(self, tenant: str) -> None:
        """Its share starts elsewhere: its old entry in the heap is void."""
        flow = self._flows.get(tenant)
        if flow is not None:
            self._enter(flow)

    def set_aside(self, ticket: Ticket) -> None:
        """The head waits for something of its own: the tenant's others go on."""
        flow = self._flows[ticket.applicant.tenant]
        flow.line_of(ticket).popleft()
        flow.aside.append(ticket)

    def bring_back(self, ticket: Ticket) -> None:
        """Somebody set aside, who still waits, is the first of its tenant."""
        flow = self._flows[ticket.applicant.tenant]
        flow.aside.remove(ticket)
        flow.line_of(ticket).appendleft(ticket)
        self._enter(flow)

    def park(self, tenant: str) -> None:
        """The tenant waits for something of its own; others go on."""
        self._flows[tenant].parked = True

    def unpark(self, tenant: str) -> None:
        """It takes part again, if it still waits."""
        flow = self._flows.get(tenant)
        if flow is not None and flow.parked:
            flow.parked = False
            self._enter(flow)

    def _count(self, flow: Flow, ticket: Ticket, sign: int) -> None:
        for counted in (self, flow):
            counted.num_waiting += sign
            counted.cost += sign * ticket.applicant.cost
        flow.num_bytes += sign * ticket.applicant.num_bytes
        flow.load = self._load(flow.num_waiting, flow.num_bytes, flow.share.weight)

    def _enter(self, flow: Flow) -> None:
        if flow.parked:
            return
        self._entries += 1
        heapq.heappush(self._heap, (flow.share.start, self._entries, flow))
        if len(self._heap) > 4 * len(self._flows) + 64:
            waiting = (other for other in self._flows.values() if not other.parked)
            self._heap = [(other.share.start, number, other) for number, other in enumerate(waiting)]
            heapq.heapify(self._heap)
