"""Limits of admission and what is charged against them: tenant limits, token rates, admission counts, requests in flight, and the
rate at which slots come free. Pure."""

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol

from router.flow_control.slo_admission import FlowItem, Ticket, TicketState

# Limits of tenants, and the protocol by which admission reads them.

MAX_WEIGHT = 1000.0


@dataclass(frozen=True)
class TenantLimits:
    """Hold the limits of one tenant.

    `weight`: its share relative to other tenants. `max_inflight` and `tokens_per_s` (prompt + output) bound it even when the mesh
    is idle; None: no bound. `burst_tokens` may come at once; None: ten seconds of the rate.
    """

    weight: float = 1.0
    max_inflight: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: float | None = None

    @property
    def burst(self) -> float:
        """Return the tokens that the bucket holds when it is full; 0 without a rate."""
        if self.burst_tokens is not None:
            return self.burst_tokens
        return 10.0 * (self.tokens_per_s or 0.0)

    def validate(self) -> None:
        """Check all fields. Raises ValueError that names the field."""
        _require(0 < self.weight <= MAX_WEIGHT, "weight", f"must be more than 0 and at most {MAX_WEIGHT:g}")
        _require(self.max_inflight is None or self.max_inflight >= 1, "max_inflight", "must be at least 1")
        _require(self.tokens_per_s is None or self.tokens_per_s > 0, "tokens_per_s", "must be positive")
        _require(self.burst_tokens is None or self.burst_tokens > 0, "burst_tokens", "must be positive")
        _require(self.burst_tokens is None or self.tokens_per_s is not None, "burst_tokens", "needs tokens_per_s")

    def at_share(self, share: float) -> "TenantLimits":
        """Return the limits with the part of rate and burst that one of several routers gives out; `share` in (0, 1]."""
        if self.tokens_per_s is None:
            return self
        return replace(self, tokens_per_s=self.tokens_per_s * share, burst_tokens=self.burst * share)


class TenantBook(Protocol):
    """Supply the limits of tenants. They are read for every request, so changed limits apply from the next request on."""

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the limits of any name, also of an unknown one; "" is the default tenant. Cheap: no I/O."""


class SameForAll:
    """Give every tenant the same limits; by default an equal weight and no bounds."""

    def __init__(self, limits: TenantLimits | None = None) -> None:
        self._limits = limits or TenantLimits()

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the same limits for every name."""
        return self._limits


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {what}")


# Token rates of tenants: a bucket each, filled at its rate and charged with the tokens that a request is expected to take.

MAX_BUCKETS = 4096


@dataclass
class TokenBucket:
    """Hold `level` tokens at the time `at` (monotonic seconds), at most `burst`. A negative level is a debt, which the rate pays
    off, too."""

    rate: float
    burst: float
    level: float
    at: float

    def follow(self, rate: float, burst: float, now: float) -> None:
        """Fill up to `now` at the old rate; the new rate applies from then on. The level is kept, as far as it fits the new
        burst."""
        self.level = min(self.burst, self.level + max(0.0, now - self.at) * self.rate)
        self.at = max(self.at, now)
        self.rate, self.burst = rate, burst
        self.level = min(self.level, burst)

    def delay_s(self, tokens: float) -> float:
        """Return the seconds until `tokens` may be taken; 0: now. A request for more than `burst` is granted when the bucket is
        full, and leaves a debt."""
        return max(0.0, min(tokens, self.burst) - self.level) / self.rate

    def take(self, tokens: float) -> None:
        """Charge `tokens`; a negative number gives tokens back, up to `burst`."""
        self.level = min(self.burst, self.level - tokens)


class TokenRates:
    """Hold the buckets of one router's tenants. Where several routers share a rate, the limits come at this router's share
    (TenantLimits.at_share) and may change with every request; `spent` is how much each tenant took here."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._buckets: dict[str, TokenBucket] = {}

    def delay_s(self, tenant: str, limits: TenantLimits, tokens: float, now: float) -> float:
        """Return in how many seconds a request of `tokens` may come; 0: now."""
        bucket = self._bucket(tenant, limits, now)
        return 0.0 if bucket is None else bucket.delay_s(tokens)

    def take(self, tenant: str, tokens: float) -> None:
        """Charge what a request is expected to take; a negative number gives back what it did not take."""
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.take(tokens)
            self.spent[tenant] = self.spent.get(tenant, 0.0) + tokens

    def _bucket(self, tenant: str, limits: TenantLimits, now: float) -> TokenBucket | None:
        if limits.tokens_per_s is None:
            if self._buckets.pop(tenant, None) is not None:
                self.spent.pop(tenant, None)
            return None
        bucket = self._buckets.get(tenant)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[tenant] = TokenBucket(limits.tokens_per_s, limits.burst, limits.burst, now)
        bucket.follow(limits.tokens_per_s, limits.burst, now)
        return bucket

    def _make_room(self, now: float) -> None:
        """Drop full buckets, since a new bucket is full as well; if none is full, drop the one that is fullest."""
        if len(self._buckets) < MAX_BUCKETS:
            return
        for bucket in self._buckets.values():
            bucket.follow(bucket.rate, bucket.burst, now)
        full = [tenant for tenant, bucket in self._buckets.items() if bucket.level >= bucket.burst]
        for tenant in full or [max(self._buckets, key=lambda name: self._buckets[name].level / self._buckets[name].burst)]:
            del self._buckets[tenant]
            self.spent.pop(tenant, None)


# Admission counts by tenant and priority, for the status. They are bounded, because clients choose tenant names.

MAX_TENANTS = 64
OTHERS = "(others)"
"""Holds the sum of the tenants that do not fit into MAX_TENANTS."""


@dataclass(eq=False)
class Tally:
    """Count one tenant's requests of one priority. `refused` counts by reason."""

    num_inflight: int = 0
    num_queued: int = 0
    num_admitted: int = 0
    num_waited: int = 0  # requests that were queued before their decision
    refused: Counter[str] = field(default_factory=Counter)


class AdmissionCounts:
    """Hold the tallies of at most MAX_TENANTS names beside OTHERS."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, int], Tally] = {}
        self._tenants: dict[str, None] = {}

    def of(self, tenant: str, priority: int) -> Tally:
        """Return the tally to count in. A ticket keeps its tally, because the name may be merged into OTHERS meanwhile."""
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS and not self._forget_one():
            tenant = OTHERS
        if tenant != OTHERS:
            self._tenants.pop(tenant, None)
            self._tenants[tenant] = None  # the most recent name is last
        return self.tallies.setdefault((tenant, priority), Tally())

    def _forget_one(self) -> bool:
        """Merge the tenant that has been idle for longest into OTHERS; False: every tenant has requests here."""
        busy = {name for (name, _), tally in self.tallies.items() if tally.num_inflight or tally.num_queued}
        quiet = next((tenant for tenant in self._tenants if tenant not in busy), None)
        if quiet is None:
            return False
        del self._tenants[quiet]
        for name, priority in [key for key in self.tallies if key[0] == quiet]:
            old, others = self.tallies.pop((name, priority)), self.tallies.setdefault((OTHERS, priority), Tally())
            others.num_admitted += old.num_admitted
            others.num_waited += old.num_waited
            others.refused.update(old.refused)
        return True


@dataclass(frozen=True)
class AdmissionSettings:
    """Hold the settings of admission. `hold_timeout_s`: how long forecasts may hold a lane back while nothing moves. `aging_s`:
    after how long a standard request gets a turn before interactive ones; 0: never."""

    max_inflight: int = 256
    max_queued: int = 256
    max_queued_bytes: int = 64 << 20
    hold_timeout_s: float = 5.0
    aging_s: float = 5.0


class InflightLimiter:
    """Bound the requests in flight, of all tenants by `max_inflight` and of each tenant by its limits; charge token rates, and
    keep the tallies of live tickets."""

    def __init__(self, max_inflight: int, tenants: TenantBook) -> None:
        self.max_inflight = max_inflight
        self.tenants = tenants
        self.num_inflight = 0
        self.counts = AdmissionCounts()
        self.rates = TokenRates()
        self._tallies: dict[int, Tally] = {}
        self._by_tenant: dict[str, int] = {}
        self._by_lane: dict[tuple[Hashable, int], int] = {}

    @property
    def is_full(self) -> bool:
        """Return whether no slot is free."""
        return self.num_inflight >= self.max_inflight

    def within_limit(self, tenant: str) -> bool:
        """Return whether the tenant's own limit allows one more request."""
        bound = self.tenants.limits_of(tenant).max_inflight
        return bound is None or self._by_tenant.get(tenant, 0) < bound

    def num_in_lane(self, lane: Hashable, below: int) -> int:
        """Return the number of requests in flight of the lane, of ranks that come before `below`."""
        num, by_lane = 0, self._by_lane
        for rank in range(below):  # runs several times for each forecast
            num += by_lane.get((lane, rank), 0)
        return num

    def open(self, ticket: Ticket, tally: Tally) -> None:
        """Register a new, waiting ticket: its tenant is charged the tokens that it is expected to take."""
        self._tallies[ticket.number] = tally
        tally.num_queued += 1
        ticket.charged = ticket.item.cost
        self.rates.take(ticket.item.tenant, ticket.charged)

    def admit(self, ticket: Ticket) -> None:
        """Move a ticket from waiting to in flight."""
        ticket.state = TicketState.ADMITTED
        self._count(ticket.item, 1)
        tally = self._tallies[ticket.number]
        tally.num_queued -= 1
        tally.num_inflight += 1
        tally.num_admitted += 1

    def refuse(self, ticket: Ticket, reason: str) -> None:
        """Refuse a waiting ticket."""
        ticket.state = TicketState.REFUSED
        self._tallies[ticket.number].refused[reason] += 1
        self._forget(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Drop a waiting ticket whose caller gave up."""
        ticket.state = TicketState.RELEASED
        self._forget(ticket)

    def release(self, ticket: Ticket, used_tokens: float) -> None:
        """Free the slot of an admitted ticket, and charge its tenant `used_tokens` instead of the expected tokens."""
        ticket.state = TicketState.RELEASED
        self._count(ticket.item, -1)
        self._tallies.pop(ticket.number).num_inflight -= 1
        self.rates.take(ticket.item.tenant, used_tokens - ticket.charged)

    def _forget(self, ticket: Ticket) -> None:
        self._tallies.pop(ticket.number).num_queued -= 1
        self.rates.take(ticket.item.tenant, -ticket.charged)

    def _count(self, item: FlowItem, sign: int) -> None:
        self.num_inflight += sign
        tenant, lane = item.tenant, (item.lane, item.rank)
        self._by_lane[lane] = self._by_lane.get(lane, 0) + sign
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + sign
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        if not self._by_lane[lane]:
            del self._by_lane[lane]


# The rate at which slots come free while requests need them.

RATE_WINDOW = 32


class BusyClock:
    """Count the seconds in which some request needed a slot. The rate of releases in that time is a limit of the mesh; in idle
    time it is not."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looked_at: float | None = None
        self._busy = False

    def advance(self, now: float, *, busy: bool) -> float:
        """Return the clock's own time, which stands still while it is not busy. `busy`: from `now` on."""
        if self._busy and self._looked_at is not None:
            self.now += max(0.0, now - self._looked_at)
        self._looked_at, self._busy = now, busy
        return self.now


class DrainRate:
    """Measure the amount that comes free per second, over the last releases. `now` is seconds of a BusyClock, amounts are the
    caller's."""

    def __init__(self) -> None:
        self._releases: deque[tuple[float, float]] = deque(maxlen=RATE_WINDOW)
        self._total = 0.0

    def record(self, now: float, amount: float = 1.0) -> None:
        """Record that `amount` came free."""
        if len(self._releases) == RATE_WINDOW:
            self._total -= self._releases[0][1]
        self._releases.append((now, amount))
        self._total += amount

    def seconds_for(self, amount: float, now: float) -> float | None:
        """Return the seconds until `amount` and one more release have come free; None while nothing is known.

        The window ends now, not at the last release, so that a mesh that stands still promises nothing soon.
        """
        if len(self._releases) < 2:
            return None
        spent_s = now - self._releases[0][0]
        return (amount + self._total / len(self._releases)) * spent_s / self._total
