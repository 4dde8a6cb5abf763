"""Token rates of tenants: a bucket each, filled at its rate, charged with what a request is expected to take. Pure."""

from dataclasses import dataclass

from router.flow_control.tenant_limits import TenantLimits

MAX_BUCKETS = 4096


@dataclass
class TokenBucket:
    """`level` tokens at the time `at` (monotonic seconds); at most `burst`. A debt is paid off at the rate, too."""

    rate: float
    burst: float
    level: float
    at: float

    def follow(self, rate: float, burst: float, now: float) -> None:
        """Fill up to now at the old rate; the new one holds from here on. What is in it stays, as far as it fits."""
        self.level = min(self.burst, self.level + max(0.0, now - self.at) * self.rate)
        self.at = max(self.at, now)
        self.rate, self.burst = rate, burst
        self.level = min(self.level, burst)

    def delay_s(self, tokens: float) -> float:
        """Seconds until `tokens` may be taken; 0: now. More than the bucket holds is given when it is full, and owed."""
        return max(0.0, min(tokens, self.burst) - self.level) / self.rate

    def take(self, tokens: float) -> None:
        """Charge, or with a negative number give back, never above the brim."""
        self.level = min(self.burst, self.level - tokens)


class TokenRates:
    """The buckets of one router's tenants. Who shares a rate with other routers gives this one limits at its share
    (TenantLimits.at_share): they are looked at with every request, and `spent` says how much each tenant took here."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._buckets: dict[str, TokenBucket] = {}

    def delay_s(self, tenant: str, limits: TenantLimits, tokens: float, now: float) -> float:
        """0: a request of so many tokens may come now. Else in how many seconds."""
        bucket = self._bucket(tenant, limits, now)
        return 0.0 if bucket is None else bucket.delay_s(tokens)

    def take(self, tenant: str, tokens: float) -> None:
        """Charge what a request is expected to take; negative: give back what it did not take."""
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
        """A full bucket remembers nothing: a new one is the same. If none is full, the one with the most in it goes."""
        if len(self._buckets) < MAX_BUCKETS:
            return
        for bucket in self._buckets.values():
            bucket.follow(bucket.rate, bucket.burst, now)
        full = [tenant for tenant, bucket in self._buckets.items() if bucket.level >= bucket.burst]
        for tenant in full or [max(self._buckets, key=lambda name: self._buckets[name].level / self._buckets[name].burst)]:
            del self._buckets[tenant]
            self.spent.pop(tenant, None)
