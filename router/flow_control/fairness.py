"""Tenants share a lane by weight, whatever ranks they declare: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). Pure.

Every tenant has a virtual start: the tokens that it was given, divided by its weight. The one with the earliest is served next,
so that whoever has a backlog gets its share however many requests another one sends, and however important it calls them. Who
comes back after a pause starts at the present virtual time less the little that can be saved up: two requests of a modest tenant
that come together do not wait as those of a flood. Rank orders a tenant's own, and those of
tenants that were given equally much: as all who stay below their share were.
"""

from collections.abc import Sequence

from router.flow_control.fair_queue import FairQueue, Share
from router.flow_control.heaviest import Heaviest
from router.flow_control.recent_use import RecentUse
from router.flow_control.slo_admission import Outlook
from router.flow_control.types import BATCH, INTERACTIVE, RANKS, STANDARD, Applicant, Ticket

MAX_IDLE_SHARES = 1024
SAVED = 2048.0
"""Tokens, for a weight of 1: who takes less than its share can be given so many at once, before others have theirs again."""
BATCH_YIELDS = 8192.0
"""Tokens, for a weight of 1: batch lets others have so much more than its own tenant was given before its turn comes."""


class Shares:
    """One lane's tenants. `per_request` and `per_byte`: what one takes of the room, whose whole is 1."""

    def __init__(self, per_request: float, per_byte: float) -> None:
        self.queues = {rank: FairQueue(self.load) for rank in RANKS}
        self.num_waiting = 0
        self._per_request = per_request
        self._per_byte = per_byte
        self._weight = 0.0  # of all who wait
        self._virtual = 0.0
        self._shares: dict[str, Share] = {}
        self._heaviest: Heaviest[Share] = Heaviest()
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

    def outlook(self, tenant: str, rank: int) -> Outlook:
        """Whether the tenant is being refused at present; of one that is not known, not."""
        share = self._shares.get(tenant)
        return Outlook() if share is None else share.outlooks.setdefault(rank, Outlook())

    def push(self, ticket: Ticket, weight: float) -> None:
        """Wait behind the tenant's own of that rank."""
        applicant, share = ticket.applicant, self.share(ticket.applicant.tenant, weight)
        if not share.num_waiting:
            self._weight += weight
            self._move(share, self._begin(share))
        self._count(share, applicant, 1)
        self._heaviest.weigh(share)
        self.queues[applicant.rank].push(ticket, share)

    def serve(self, ticket: Ticket) -> None:
        """It was its turn and it goes: its tenant is charged."""
        self.charge(ticket.applicant, self._shares[ticket.applicant.tenant].weight)
        self._remove(ticket, served=True)

    def remove(self, ticket: Ticket) -> None:
        """It waits no more; the caller changes its state. What the tenant was charged stays as it is."""
        self._remove(ticket, served=False)

    def charge(self, applicant: Applicant, weight: float) -> None:
        """Its tenant was given what it costs, also past the queue."""
        share = self.share(applicant.tenant, weight)
        begin = self._begin(share)
        flow = self.queues[applicant.rank].flow(applicant.tenant)
        if flow is None or not flow.parked:
            self._virtual = self._first_start(begin)
        self._move(share, begin + applicant.cost / weight)
        self._recent.charge(share.recent, applicant.cost, weight)

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
            start = self._turn(self._shares[head.applicant.tenant].start, rank)
            if best is None or start < best_start:
                best, best_start = self.queues[rank], start
        return best

    def is_first(self, applicant: Applicant) -> bool:
        """It would be before everybody who waits for a turn."""
        if not self.num_waiting:
            return True
        share = self._shares.get(applicant.tenant)
        start = self._virtual if share is None else self._begin(share)
        mine = self._turn(start, applicant.rank), applicant.rank, start
        for rank, queue in self.queues.items():
            head = queue.head() if queue.num_waiting else None
            if head is not None:
                theirs = self._shares[head.applicant.tenant].start
                if (self._turn(theirs, rank), rank, theirs) <= mine:
                    return False
        return True

    def is_owed(self, tenant: str) -> bool:
        """Others were given more of late, for their weight. Its virtual start would not do: every request that it was given
        puts that ahead for a while, and a second one that came soon would be taken for greed."""
        share = self._shares.get(tenant)
        return bool(self._shares) if share is None else self._recent.is_below(share.recent, share.weight)

    def cost_ahead(self, applicant: Applicant, weight: float) -> float:
        """Tokens that are served before a newcomer's: of its tenant's, what is not of lower rank; and what others are given
        meanwhile, before batch all that is not batch."""
        share = self.share(applicant.tenant, weight)
        others_weight = self._weight - (share.weight if share.num_waiting else 0.0)
        above = self.queues[INTERACTIVE].cost + self.queues[STANDARD].cost
        if applicant.rank == BATCH:
            flow_cost = self._flow_cost(applicant.tenant, BATCH)
            return above + min(self.queues[BATCH].cost, flow_cost * (others_weight + weight) / weight)
        costs = {rank: self._flow_cost(applicant.tenant, rank) for rank in (INTERACTIVE, STANDARD)}
        own = sum(cost for rank, cost in costs.items() if rank <= applicant.rank)
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
        starts = [self._shares[head.applicant.tenant].start for head in heads if head is not None]
        return max(self._virtual, min((begin, *starts)))

    def _remove(self, ticket: Ticket, *, served: bool) -> None:
        applicant = ticket.applicant
        share = self._shares[applicant.tenant]
        self.queues[applicant.rank].remove(ticket, served=served)
        self._count(share, applicant, -1)
        if not share.num_waiting:
            self._weight = self._weight - share.weight if self.num_waiting else 0.0  # rounding errors are not carried along

    def _count(self, share: Share, applicant: Applicant, sign: int) -> None:
        self.num_waiting += sign
        share.num_waiting += sign
        share.num_bytes += sign * applicant.num_bytes
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
