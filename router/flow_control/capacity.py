"""Who holds a place, and what they were charged for it. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass

from router.flow_control.admission_counts import AdmissionCounts, Tally
from router.flow_control.tenant_limits import TenantBook
from router.flow_control.token_bucket import TokenRates
from router.flow_control.types import Applicant, Ticket, TicketState


@dataclass(frozen=True)
class AdmissionSettings:
    """`hold_timeout_s`: how long forecasts may hold everybody back while nothing moves. `aging_s`: after how long a standard
    request gets a turn beside interactive ones; 0: never."""

    max_inflight: int = 256
    max_queued: int = 256
    max_queued_bytes: int = 64 << 20
    hold_timeout_s: float = 5.0
    aging_s: float = 5.0


class Places:
    """At most `max_inflight`, of one tenant at most what its limits say; keeps tokens and tallies of all tickets that live."""

    def __init__(self, max_inflight: int, book: TenantBook) -> None:
        self.max_inflight = max_inflight
        self.book = book
        self.num_inflight = 0
        self.counts = AdmissionCounts()
        self.rates = TokenRates()
        self._tallies: dict[int, Tally] = {}
        self._by_tenant: dict[str, int] = {}
        self._by_lane: dict[tuple[Hashable, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Nobody can be admitted."""
        return self.num_inflight >= self.max_inflight

    def within_limit(self, tenant: str) -> bool:
        """The tenant itself may have one more."""
        bound = self.book.limits_of(tenant).max_inflight
        return bound is None or self._by_tenant.get(tenant, 0) < bound

    def num_in_lane(self, lane: Hashable, below: int) -> int:
        """Of the lane, of ranks that come before `below`."""
        num, by_lane = 0, self._by_lane
        for rank in range(below):  # asked about each forecast, several times
            num += by_lane.get((lane, rank), 0)
        return num

    def open(self, ticket: Ticket, tally: Tally) -> None:
        """A new ticket, that waits: its tenant is charged what it is expected to take."""
        self._tallies[ticket.number] = tally
        tally.num_queued += 1
        ticket.charged = ticket.applicant.cost
        self.rates.take(ticket.applicant.tenant, ticket.charged)

    def admit(self, ticket: Ticket) -> None:
        """It waits no more."""
        ticket.state = TicketState.ADMITTED
        self._count(ticket.applicant, 1)
        tally = self._tallies[ticket.number]
        tally.num_queued -= 1
        tally.num_inflight += 1
        tally.num_admitted += 1

    def refuse(self, ticket: Ticket, reason: str) -> None:
        """It waited in vain."""
        ticket.state = TicketState.REFUSED
        self._tallies[ticket.number].refused[reason] += 1
        self._forget(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It gives its turn up."""
        ticket.state = TicketState.RELEASED
        self._forget(ticket)

    def release(self, ticket: Ticket, used_tokens: float) -> None:
        """It gives its place back; its tenant has paid what was used."""
        ticket.state = TicketState.RELEASED
        self._count(ticket.applicant, -1)
        self._tallies.pop(ticket.number).num_inflight -= 1
        self.rates.take(ticket.applicant.tenant, used_tokens - ticket.charged)

    def _forget(self, ticket: Ticket) -> None:
        self._tallies.pop(ticket.number).num_queued -= 1
        self.rates.take(ticket.applicant.tenant, -ticket.charged)

    def _count(self, applicant: Applicant, sign: int) -> None:
        self.num_inflight += sign
        tenant, lane = applicant.tenant, (applicant.lane, applicant.rank)
        self._by_lane[lane] = self._by_lane.get(lane, 0) + sign
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + sign
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        if not self._by_lane[lane]:
            del self._by_lane[lane]
