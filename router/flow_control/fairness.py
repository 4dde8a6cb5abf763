"""Tenants share a lane by weight, whatever ranks they declare: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). Pure.

Every tenant has a virtual start: the tokens that it was given, divided by its weight. The tenant with the earliest start is
served next, so a tenant with a backlog gets its share, however many requests another tenant sends and whatever rank it gives
them. A tenant that was idle starts at the present virtual time less a bounded saving (SAVED): two requests of a modest tenant
that come together do not wait like those of a flood. Rank orders the requests of one tenant, and of tenants with equal starts,
which includes all tenants below their share. Hints (priority_hint) order the requests of one tenant and one rank alone: whose
turn it is, and which tenant loses a request, is decided before any hint is looked at.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from router.flow_control.slo_admission import BATCH, INTERACTIVE, RANKS, STANDARD, FlowItem, Line, SloEstimate, Ticket

# The heaviest load: a heap whose stale entries are skipped.


class Holder(Protocol):
    """Have a load. `load`: the part of the queue that the tenant holds, divided by its weight."""

    num_waiting: int

    @property
    def load(self) -> float: ...


Item = TypeVar("Item", bound=Holder)


class IndexedHeap(Generic[Item]):
    """Order items by load. The caller reports an increase with `weigh`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._entries = 0
        self._bound = 64

    def weigh(self, entry: Item) -> None:
        """Record that the load has grown; `top` finds out by itself that a load has shrunk."""
        self._entries += 1
        heapq.heappush(self._heap, (-entry.load, self._entries, entry))
        if len(self._heap) > self._bound:
            waiting = {id(other): other for _, _, other in self._heap if other.num_waiting}
            self._heap = [(-other.load, number, other) for number, other in enumerate(waiting.values())]
            heapq.heapify(self._heap)
            self._bound = 4 * len(self._heap) + 64

    def top(self) -> Item | None:
        """Return the heaviest item; None when nothing waits."""
        while self._heap:
            load, _, entry = self._heap[0]
            if entry.num_waiting and -load == entry.load:
                return entry
            heapq.heappop(self._heap)
            if entry.num_waiting:
                self.weigh(entry)  # its load was larger before
        return None


# Recent use of tenants. Time is counted in tokens that were given to any tenant.
#
#     use      = tokens given to a tenant; a token that was given WINDOW_TOKENS tokens ago counts 1/e
#     level    = use / weight
#     typical  = the mean level over recent tokens: the level of the tenant to which the typical token went
#
# A tenant well below the typical level takes less than the others. No tenant is below it where all take equally much, nor one
# that is alone. A charge costs the same however many tenants there are.

WINDOW_TOKENS = 32768.0
BELOW = 0.9
"""Fraction of the typical level. Closer to 1, tenants that take equally much would be found below it in turn."""


@dataclass
class Use:
    """Hold one tenant's use, as of the time when `as_of` tokens had been given to all tenants."""

    tokens: float = 0.0
    as_of: float = 0.0


class RecentUse:
    """Hold the sums over all tenants. A tenant that is dropped fades from the sums by itself."""

    def __init__(self) -> None:
        self._given = 0.0  # to all tenants, since the start
        self._tokens = 0.0  # recent
        self._squares = 0.0  # recent: use²/weight over all tenants

    def charge(self, use: Use, tokens: float, weight: float) -> None:
        """Record that a tenant was given `tokens`."""
        kept = math.exp(-tokens / WINDOW_TOKENS)
        before = self._of(use) * kept
        self._given += tokens
        self._tokens = self._tokens * kept + tokens
        self._squares = self._squares * kept * kept + tokens * (2 * before + tokens) / weight
        use.tokens, use.as_of = before + tokens, self._given

    def is_below(self, use: Use, weight: float) -> bool:
        """Return whether this tenant was given less than its share."""
        return self._of(use) / weight * self._tokens < BELOW * self._squares

    def _of(self, use: Use) -> float:
        return use.tokens * math.exp((use.as_of - self._given) / WINDOW_TOKENS)


# Waiting tickets of one lane and rank, by tenant: the head belongs to the tenant with the earliest virtual start.


@dataclass(eq=False)
class Share:
    """Hold one tenant's share of a lane, over all ranks. `start`: its virtual start, in tokens divided by weight."""

    tenant: str
    weight: float
    start: float
    num_waiting: int = 0
    num_bytes: int = 0
    load: float = 0.0  # the part of the queue that it holds, divided by its weight
    outlooks: dict[int, SloEstimate] = field(default_factory=dict)
    recent: Use = field(default_factory=Use)


@dataclass(eq=False)
class Flow:
    """Hold one tenant's tickets in a queue. `resumed`: those whose clients have tokens already. `aside`: those that wait for
    their own objective. `costs`: the tokens of its requests by hint."""

    share: Share
    tickets: Line = field(default_factory=Line)
    resumed: Line = field(default_factory=Line)
    aside: Line = field(default_factory=Line)
    costs: dict[int, float] = field(default_factory=dict)
    num_waiting: int = 0
    num_bytes: int = 0
    cost: float = 0.0
    load: float = 0.0
    parked: bool = False  # the whole tenant is blocked, by its own limit or rank
    resumed_is_next: bool = True

    def head(self) -> Ticket | None:
        """Return the next ticket: that of the highest hint, the oldest of equals; resumed and other tickets take turns."""
        new, resumed = self.tickets.first(), self.resumed.first()
        if new is None or resumed is None:
            return new or resumed
        if new.item.hint != resumed.item.hint:
            return max(new, resumed, key=lambda ticket: ticket.item.hint)
        return resumed if self.resumed_is_next else new

    def last(self) -> Ticket | None:
        """Return the ticket that is evicted first: that of the lowest hint, the newest of equals."""
        waiting = [ticket for line in (self.tickets, self.resumed, self.aside) if (ticket := line.last()) is not None]
        return max(waiting, key=lambda ticket: (-ticket.item.hint, ticket.number), default=None)

    def line_of(self, ticket: Ticket) -> Line:
        """Return the line in which the ticket waits for its turn."""
        return self.resumed if ticket.item.started else self.tickets

    def cost_before(self, hint: int) -> float:
        """Return the tokens that are served before a new request with this hint."""
        return sum(cost for other, cost in self.costs.items() if other >= hint)

    def count(self, item: FlowItem, sign: int) -> None:
        """Count a request that comes (1) or goes (-1)."""
        self.num_waiting += sign
        self.num_bytes += sign * item.num_bytes
        self.cost += sign * item.cost
        left = self.costs.get(item.hint, 0.0) + sign * item.cost
        if left > 0:
            self.costs[item.hint] = left
        else:
            self.costs.pop(item.hint, None)

    def tidy(self, gone: Ticket) -> None:
        """Bound the number of stale tickets; `gone` is about to become one."""
        num_held = len(self.tickets) + len(self.resumed) + len(self.aside)
        if not self.num_waiting or num_held > 2 * self.num_waiting + 16:
            self.tickets, self.resumed, self.aside = (line.tidied(gone) for line in (self.tickets, self.resumed, self.aside))


class FairQueue:
    """Hold the tickets of one lane and rank. `load`: maps number, bytes and weight to the part of the queue that they are."""

    def __init__(self, load: Callable[[int, int, float], float]) -> None:
        self._load = load
        self.num_waiting = 0
        self.cost = 0.0
        self._heaviest: IndexedHeap[Flow] = IndexedHeap()
        self._flows: dict[str, Flow] = {}
        self._heap: list[tuple[float, int, Flow]] = []
        self._entries = 0

    def heaviest(self) -> Flow | None:
        """Return the flow of the tenant that holds most of this queue for its weight; None when nothing waits."""
        return self._heaviest.top()

    def flow(self, tenant: str) -> Flow | None:
        """Return the tenant's flow, if it waits here."""
        return self._flows.get(tenant)

    def last(self, tenant: str) -> Ticket | None:
        """Return the tenant's ticket here that is evicted first."""
        flow = self._flows.get(tenant)
        return None if flow is None else flow.last()

    def push(self, ticket: Ticket, share: Share) -> None:
        """Append a ticket to the tenant's flow."""
        flow = self._flows.get(share.tenant)
        if flow is None:
            flow = self._flows[share.tenant] = Flow(share)
        flow.line_of(ticket).append(ticket)
        self._count(flow, ticket, 1)
        self._heaviest.weigh(flow)
        self._enter(flow)

    def head(self) -> Ticket | None:
        """Return the next ticket; None when no ticket waits for a turn. It stays until `remove`, `set_aside` or `park`."""
        while self._heap:
            start, _, flow = self._heap[0]
            if start == flow.share.start and not flow.parked and flow.num_waiting:
                ticket = flow.head()
                if ticket is not None:
                    return ticket
            heapq.heappop(self._heap)  # the flow has another entry, or needs none
        return None

    def remove(self, ticket: Ticket, *, served: bool = False) -> None:
        """Remove a ticket; the caller changes its state. `served`: it was admitted."""
        flow = self._flows[ticket.item.tenant]
        self._count(flow, ticket, -1)
        if served:
            flow.resumed_is_next = not ticket.item.started
        flow.tidy(ticket)
        if not flow.num_waiting:
            del self._flows[ticket.item.tenant]

    def moved(self, tenant: str) -> None:
        """Record that the share's start has changed, which makes its old entry in the heap stale."""
        flow = self._flows.get(tenant)
        if flow is not None:
            self._enter(flow)

    def set_aside(self, ticket: Ticket) -> None:
        """Set the tenant's head aside, because it waits for its own objective: the tenant's other tickets go on."""
        flow = self._flows[ticket.item.tenant]
        flow.line_of(ticket).remove(ticket)
        flow.aside.append(ticket)

    def bring_back(self, ticket: Ticket) -> None:
        """Put a ticket that was set aside, and still waits, back at the head of its tenant."""
        flow = self._flows[ticket.item.tenant]
        flow.aside.remove(ticket)
        flow.line_of(ticket).appendleft(ticket)
        self._enter(flow)

    def park(self, tenant: str) -> None:
        """Block the tenant; others go on."""
        self._flows[tenant].parked = True

    def unpark(self, tenant: str) -> None:
        """Let the tenant take part again, if it still waits."""
        flow = self._flows.get(tenant)
        if flow is not None and flow.parked:
            flow.parked = False
            self._enter(flow)

    def _count(self, flow: Flow, ticket: Ticket, sign: int) -> None:
        self.num_waiting += sign
        self.cost += sign * ticket.item.cost
        flow.count(ticket.item, sign)
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
"""Tokens, for a weight of 1: a tenant that takes less than its share can be given this many at once before other tenants come
again."""
BATCH_YIELDS = 8192.0
"""Tokens, for a weight of 1: other tenants may be given this many more than a batch request's own tenant before its turn
comes."""


class FairShare:
    """Share one lane between tenants. `per_request` and `per_byte`: the part of the queue, of 1, that one request or one byte
    takes."""

    def __init__(self, per_request: float, per_byte: float) -> None:
        self.queues = {rank: FairQueue(self.load) for rank in RANKS}
        self.num_waiting = 0
        self._per_request = per_request
        self._per_byte = per_byte
        self._weight = 0.0  # of all waiting tenants
        self._virtual = 0.0
        self._shares: dict[str, Share] = {}
        self._heaviest: IndexedHeap[Share] = IndexedHeap()
        self._recent = RecentUse()

    def load(self, num: int, num_bytes: int, weight: float) -> float:
        """Return the part of the queue that the requests and their bytes are, divided by the weight."""
        return max(num * self._per_request, num_bytes * self._per_byte) / weight

    def heaviest(self) -> Share | None:
        """Return the share of the tenant that holds most for its weight; None when nothing waits."""
        return self._heaviest.top()

    def share(self, tenant: str, weight: float) -> Share:
        """Return the tenant's share, which is made if there is none; a new weight applies from now on."""
        share = self._shares.get(tenant)
        if share is None:
            self._forget_idle()
            share = self._shares[tenant] = Share(tenant, weight, self._virtual)
        if share.num_waiting:
            self._weight += weight - share.weight
        share.weight = weight
        return share

    def outlook(self, tenant: str, rank: int) -> SloEstimate:
        """Return the estimate that says whether the tenant is refused at present; for an unknown tenant it is not."""
        share = self._shares.get(tenant)
        return SloEstimate() if share is None else share.outlooks.setdefault(rank, SloEstimate())

    def push(self, ticket: Ticket, weight: float) -> None:
        """Append a ticket to the tenant's tickets of its rank."""
        item, share = ticket.item, self.share(ticket.item.tenant, weight)
        if not share.num_waiting:
            self._weight += weight
            self._move(share, self._begin(share))
        self._count(share, item, 1)
        self._heaviest.weigh(share)
        self.queues[item.rank].push(ticket, share)

    def serve(self, ticket: Ticket) -> None:
        """Remove an admitted ticket, and charge its tenant."""
        self.charge(ticket.item, self._shares[ticket.item.tenant].weight)
        self._remove(ticket, served=True)

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket that is not admitted; the caller changes its state. What the tenant was charged stays."""
        self._remove(ticket, served=False)

    def charge(self, item: FlowItem, weight: float) -> None:
        """Charge the item's tenant for its cost, also when the item did not wait in the queue."""
        share = self.share(item.tenant, weight)
        begin = self._begin(share)
        flow = self.queues[item.rank].flow(item.tenant)
        if flow is None or not flow.parked:
            self._virtual = self._first_start(begin)
        self._move(share, begin + item.cost / weight)
        self._recent.charge(share.recent, item.cost, weight)

    def settle(self, tenant: str, extra: float) -> None:
        """Correct a charge: the request took `extra` tokens more (negative: fewer) than it was charged."""
        share = self._shares.get(tenant)
        if share is not None:
            self._move(share, max(self._virtual - SAVED, share.start + extra / share.weight))

    def first(self, ranks: Sequence[int]) -> FairQueue | None:
        """Return the queue whose head is next. `ranks`: those that take part; of equal tenants the earlier rank goes first."""
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
        """Return whether the item would be served before every ticket that waits for a turn."""
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
        """Return whether other tenants were given more recently, for their weight. The virtual start would not do: each request
        puts it ahead for a while, so a second request soon after would seem greedy."""
        share = self._shares.get(tenant)
        return bool(self._shares) if share is None else self._recent.is_below(share.recent, share.weight)

    def cost_ahead(self, item: FlowItem, weight: float) -> float:
        """Return the tokens that are served before a new item: those of its own tenant, except of lower ranks and, in its rank,
        of lower hints, and those that other tenants are given meanwhile; for batch also everything that is not batch."""
        share = self.share(item.tenant, weight)
        others_weight = self._weight - (share.weight if share.num_waiting else 0.0)
        above = self.queues[INTERACTIVE].cost + self.queues[STANDARD].cost
        if item.rank == BATCH:
            flow_cost = self._cost_before(item)
            return above + min(self.queues[BATCH].cost, flow_cost * (others_weight + weight) / weight)
        costs = {rank: self._flow_cost(item.tenant, rank) for rank in (INTERACTIVE, STANDARD)}
        own = sum(cost for rank, cost in costs.items() if rank < item.rank) + self._cost_before(item)
        saved = max(0.0, self._virtual - self._begin(share))
        return own + min(above - sum(costs.values()), max(0.0, own / weight - saved) * others_weight)

    def _flow_cost(self, tenant: str, rank: int) -> float:
        flow = self.queues[rank].flow(tenant)
        return 0.0 if flow is None else flow.cost

    def _cost_before(self, item: FlowItem) -> float:
        """Return the tokens of its own tenant and rank that are served before a new item."""
        flow = self.queues[item.rank].flow(item.tenant)
        return 0.0 if flow is None else flow.cost_before(item.hint)

    def _begin(self, share: Share) -> float:
        return max(self._virtual - SAVED, share.start)

    def _turn(self, start: float, rank: int) -> float:
        """Return the place in the order. All tenants below their share are equal: rank decides between them, then what they have
        saved."""
        start = max(self._virtual, start)
        return start + BATCH_YIELDS if rank == BATCH else start

    def _first_start(self, begin: float) -> float:
        """Return the new virtual time, which is the start of what is in service: it never goes back, nor beyond the earliest
        waiting start."""
        heads = (queue.head() for queue in self.queues.values() if queue.num_waiting)
        starts = [self._shares[head.item.tenant].start for head in heads if head is not None]
        return max(self._virtual, min((begin, *starts)))

    def _remove(self, ticket: Ticket, *, served: bool) -> None:
        item = ticket.item
        share = self._shares[item.tenant]
        self.queues[item.rank].remove(ticket, served=served)
        self._count(share, item, -1)
        if not share.num_waiting:
            self._weight = self._weight - share.weight if self.num_waiting else 0.0  # drops accumulated rounding errors

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
        """Drop shares that wait for nothing and are not ahead of virtual time; if there are none beyond the bound, drop all idle
        ones."""
        if len(self._shares) < MAX_IDLE_SHARES + self.num_waiting:
            return
        idle = [share for share in self._shares.values() if not share.num_waiting]
        passed = [share for share in idle if share.start <= self._virtual]
        for share in passed or idle:
            del self._shares[share.tenant]
