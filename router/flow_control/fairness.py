"""Tenants share a lane by weight, whatever ranks they declare: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). Pure.

Every tenant has a virtual start: the tokens that it was given, divided by its weight. The one with the earliest is served next,
so that whoever has a backlog gets its share however many requests another one sends, and however important it calls them. Who
comes back after a pause starts at the present virtual time less the little that can be saved up: two requests of a modest tenant
that come together do not wait as those of a flood. Rank orders a tenant's own, and those of
tenants that were given equally much: as all who stay below their share were.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from router.flow_control.slo_admission import BATCH, INTERACTIVE, RANKS, STANDARD, FlowItem, SloEstimate, Ticket, TicketState

# Who holds most of a room: a heap whose old entries are void. Pure.


class Holder(Protocol):
    """`load`: what it holds of the room, for its weight."""

    num_waiting: int

    @property
    def load(self) -> float: ...


Item = TypeVar("Item", bound=Holder)


class IndexedHeap(Generic[Item]):
    """Items by load; whoever changes an entry's load says so with `weigh`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._entries = 0
        self._bound = 64

    def weigh(self, entry: Item) -> None:
        """It holds more than before; who holds less is found out by `top`."""
        self._entries += 1
        heapq.heappush(self._heap, (-entry.load, self._entries, entry))
        if len(self._heap) > self._bound:
            waiting = {id(other): other for _, _, other in self._heap if other.num_waiting}
            self._heap = [(-other.load, number, other) for number, other in enumerate(waiting.values())]
            heapq.heapify(self._heap)
            self._bound = 4 * len(self._heap) + 64

    def top(self) -> Item | None:
        """None when nobody waits."""
        while self._heap:
            load, _, entry = self._heap[0]
            if entry.num_waiting and -load == entry.load:
                return entry
            heapq.heappop(self._heap)
            if entry.num_waiting:
                self.weigh(entry)  # it was heavier once
        return None


# Who was given how much of late, and who of them less than its share. Pure: time is counted in tokens that anybody was given.
#
#     use      = tokens given to a tenant, a token that was given WINDOW_TOKENS tokens ago counting 1/e
#     level    = use / weight
#     typical  = the mean level over recent tokens: that of the tenant to whom the typical token went
#
# A tenant well below the typical level takes less than the others beside it. Nobody's level is below it where all take equally
# much, and not that of a tenant alone. Each charge costs the same however many tenants there are.


WINDOW_TOKENS = 32768.0
BELOW = 0.9
"""Of the typical level: above it, tenants that take equally much would be called poor by turns."""


@dataclass
class Use:
    """One tenant's: its tokens as of when so many had been given to anybody."""

    tokens: float = 0.0
    as_of: float = 0.0


class RecentUse:
    """All tenants'. Whoever is forgotten fades from the sums by itself."""

    def __init__(self) -> None:
        self._given = 0.0  # ever, to anybody
        self._tokens = 0.0  # of late
        self._squares = 0.0  # of late: use²/weight over all tenants

    def charge(self, use: Use, tokens: float, weight: float) -> None:
        """A tenant was given so many."""
        kept = math.exp(-tokens / WINDOW_TOKENS)
        before = self._of(use) * kept
        self._given += tokens
        self._tokens = self._tokens * kept + tokens
        self._squares = self._squares * kept * kept + tokens * (2 * before + tokens) / weight
        use.tokens, use.as_of = before + tokens, self._given

    def is_below(self, use: Use, weight: float) -> bool:
        """Was this tenant given less than its share?"""
        return self._of(use) / weight * self._tokens < BELOW * self._squares

    def _of(self, use: Use) -> float:
        return use.tokens * math.exp((use.as_of - self._given) / WINDOW_TOKENS)


# Those of one lane and rank who wait, by tenant: the tenant that was given least for its weight is the head. Pure.


@dataclass(eq=False)
class Share:
    """One tenant's in one lane, whatever ranks it declares. `start`: the tokens that it was given, for its weight."""

    tenant: str
    weight: float
    start: float
    num_waiting: int = 0
    num_bytes: int = 0
    load: float = 0.0  # what it holds of the room, for its weight
    outlooks: dict[int, SloEstimate] = field(default_factory=dict)
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
        return self.resumed if ticket.item.started else self.tickets

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
        self._heaviest: IndexedHeap[Flow] = IndexedHeap()
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
        flow = self._flows[ticket.item.tenant]
        self._count(flow, ticket, -1)
        if served:
            flow.resumed_is_next = not ticket.item.started
        flow.tidy(ticket)
        if not flow.num_waiting:
            del self._flows[ticket.item.tenant]

    def moved(self, tenant: str) -> None:
        """Its share starts elsewhere: its old entry in the heap is void."""
        flow = self._flows.get(tenant)
        if flow is not None:
            self._enter(flow)

    def set_aside(self, ticket: Ticket) -> None:
        """The head waits for something of its own: the tenant's others go on."""
        flow = self._flows[ticket.item.tenant]
        flow.line_of(ticket).popleft()
        flow.aside.append(ticket)

    def bring_back(self, ticket: Ticket) -> None:
        """Somebody set aside, who still waits, is the first of its tenant."""
        flow = self._flows[ticket.item.tenant]
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
            counted.cost += sign * ticket.item.cost
        flow.num_bytes += sign * ticket.item.num_bytes
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


MAX_IDLE_SHARES = 1024
SAVED = 2048.0
"""Tokens, for a weight of 1: who takes less than its share can be given so many at once, before others have theirs again."""
BATCH_YIELDS = 8192.0
"""Tokens, for a weight of 1: batch lets others have so much more than its own tenant was given before its turn comes."""


class FairShare:
    """One lane's tenants. `per_request` and `per_byte`: what one takes of the room, whose whole is 1."""

    def __init__(self, per_request: float, per_byte: float) -> None:
        self.queues = {rank: FairQueue(self.load) for rank in RANKS}
        self.num_waiting = 0
        self._per_request = per_request
        self._per_byte = per_byte
        self._weight = 0.0  # of all who wait
        self._virtual = 0.0
        self._shares: dict[str, Share] = {}
        self._heaviest: IndexedHeap[Share] = IndexedHeap()
        self._recent = RecentUse()

    def load(self, num: int, num_bytes: int, weight: float) -> float:
        """What so many requests, or so many bytes, are of the room, for their weight."""
        return max(num * self._per_request, num_bytes * self._per_byte) / weight

    def heaviest(self) -> Share | None:
        """Of the tenant that holds most for its weight; None when nobody waits."""
        return self._heaviest.top()

    def share(self, tenant: str, weight: float) -> Share:
        """The tenant's, made if there is none; a new weight holds from here on."""
        share = self._shares.get(tenant)
        if share is None:
            self._forget_idle()
            share = self._shares[tenant] = Share(tenant, weight, self._virtual)
        if share.num_waiting:
            self._weight += weight - share.weight
        share.weight = weight
        return share

    def outlook(self, tenant: str, rank: int) -> SloEstimate:
        """Whether the tenant is being refused at present; of one that is not known, not."""
        share = self._shares.get(tenant)
        return SloEstimate() if share is None else share.outlooks.setdefault(rank, SloEstimate())

    def push(self, ticket: Ticket, weight: float) -> None:
        """Wait behind the tenant's own of that rank."""
        item, share = ticket.item, self.share(ticket.item.tenant, weight)
        if not share.num_waiting:
            self._weight += weight
            self._move(share, self._begin(share))
        self._count(share, item, 1)
        self._heaviest.weigh(share)
        self.queues[item.rank].push(ticket, share)

    def serve(self, ticket: Ticket) -> None:
        """It was its turn and it goes: its tenant is charged."""
        self.charge(ticket.item, self._shares[ticket.item.tenant].weight)
        self._remove(ticket, served=True)

    def remove(self, ticket: Ticket) -> None:
        """It waits no more; the caller changes its state. What the tenant was charged stays as it is."""
        self._remove(ticket, served=False)

    def charge(self, item: FlowItem, weight: float) -> None:
        """Its tenant was given what it costs, also past the queue."""
        share = self.share(item.tenant, weight)
        begin = self._begin(share)
        flow = self.queues[item.rank].flow(item.tenant)
        if flow is None or not flow.parked:
            self._virtual = self._first_start(begin)
        self._move(share, begin + item.cost / weight)
        self._recent.charge(share.recent, item.cost, weight)

    def settle(self, tenant: str, extra: float) -> None:
        """It took `extra` tokens more (negative: fewer) than it was charged."""
        share = self._shares.get(tenant)
        if share is not None:
            self._move(share, max(self._virtual - SAVED, share.start + extra / share.weight))

    def first(self, ranks: Sequence[int]) -> FairQueue | None:
        """Whose head is next; `ranks`: those that are asked, the first of them first among equals."""
        best: FairQueue | None = None
        best_start = 0.0
        for rank in ranks:
            head = self.queues[rank].head() if self.queues[rank].num_waiting else None
            if head is None:
                continue
            start = self._turn(self._shares[head.item.tenant].start, rank)
            if best is None or start < best_start:
                best, best_start = self.queues[rank], start
        return best

    def is_first(self, item: FlowItem) -> bool:
        """It would be before everybody who waits for a turn."""
        if not self.num_waiting:
            return True
        share = self._shares.get(item.tenant)
        start = self._virtual if share is None else self._begin(share)
        mine = self._turn(start, item.rank), item.rank, start
        for rank, queue in self.queues.items():
            head = queue.head() if queue.num_waiting else None
            if head is not None:
                theirs = self._shares[head.item.tenant].start
                if (self._turn(theirs, rank), rank, theirs) <= mine:
                    return False
        return True

    def is_owed(self, tenant: str) -> bool:
        """Others were given more of late, for their weight. Its virtual start would not do: every request that it was given
        puts that ahead for a while, and a second one that came soon would be taken for greed."""
        share = self._shares.get(tenant)
        return bool(self._shares) if share is None else self._recent.is_below(share.recent, share.weight)

    def cost_ahead(self, item: FlowItem, weight: float) -> float:
        """Tokens that are served before a newcomer's: of its tenant's, what is not of lower rank; and what others are given
        meanwhile, before batch all that is not batch."""
        share = self.share(item.tenant, weight)
        others_weight = self._weight - (share.weight if share.num_waiting else 0.0)
        above = self.queues[INTERACTIVE].cost + self.queues[STANDARD].cost
        if item.rank == BATCH:
            flow_cost = self._flow_cost(item.tenant, BATCH)
            return above + min(self.queues[BATCH].cost, flow_cost * (others_weight + weight) / weight)
        costs = {rank: self._flow_cost(item.tenant, rank) for rank in (INTERACTIVE, STANDARD)}
        own = sum(cost for rank, cost in costs.items() if rank <= item.rank)
        saved = max(0.0, self._virtual - self._begin(share))
        return own + min(above - sum(costs.values()), max(0.0, own / weight - saved) * others_weight)

    def _flow_cost(self, tenant: str, rank: int) -> float:
        flow = self.queues[rank].flow(tenant)
        return 0.0 if flow is None else flow.cost

    def _begin(self, share: Share) -> float:
        return max(self._virtual - SAVED, share.start)

    def _turn(self, start: float, rank: int) -> float:
        """All who are below their share are equal: between them rank decides, and then what they have saved up."""
        start = max(self._virtual, start)
        return start + BATCH_YIELDS if rank == BATCH else start

    def _first_start(self, begin: float) -> float:
        """Virtual time is the start of what is in service: it never goes back, nor beyond the earliest who waits."""
        heads = (queue.head() for queue in self.queues.values() if queue.num_waiting)
        starts = [self._shares[head.item.tenant].start for head in heads if head is not None]
        return max(self._virtual, min((begin, *starts)))

    def _remove(self, ticket: Ticket, *, served: bool) -> None:
        item = ticket.item
        share = self._shares[item.tenant]
        self.queues[item.rank].remove(ticket, served=served)
        self._count(share, item, -1)
        if not share.num_waiting:
            self._weight = self._weight - share.weight if self.num_waiting else 0.0  # rounding errors are not carried along

    def _count(self, share: Share, item: FlowItem, sign: int) -> None:
        self.num_waiting += sign
        share.num_waiting += sign
        share.num_bytes += sign * item.num_bytes
        share.load = self.load(share.num_waiting, share.num_bytes, share.weight)

    def _move(self, share: Share, start: float) -> None:
        share.start = start
        for queue in self.queues.values():
            queue.moved(share.tenant)

    def _forget_idle(self) -> None:
        """Who waits for nothing and is not ahead of others needs no memory; beyond the bound nobody idle is remembered."""
        if len(self._shares) < MAX_IDLE_SHARES + self.num_waiting:
            return
        idle = [share for share in self._shares.values() if not share.num_waiting]
        passed = [share for share in idle if share.start <= self._virtual]
        for share in passed or idle:
            del self._shares[share.tenant]
