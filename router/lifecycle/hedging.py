"""Hedging: when a late prefill is given to another prefill worker. Pure: time and measurements are passed in.

A decode reservation has one attempt in force at a time. So a hedge is the next attempt, which fences the one before, whose worker
is told to stop. If the earlier attempt has committed meanwhile, the decode worker refuses the next one, and the earlier attempt
has won after all.

Hedges waste work, and under overload all prefills are late, so they come out of a budget that requests fill. Only when a worker
has fallen silent, and will not answer any sooner, does a hedge need no budget.
"""

from collections import deque
from dataclasses import dataclass, field

SAMPLES_PER_LENGTH = 64
MIN_SAMPLES = 4


@dataclass(frozen=True)
class HedgeLimits:
    """Hold the limits. `share`: hedges for each request that goes to a prefill worker; 0 switches them off. Times are seconds."""

    share: float = 0.05
    burst: float = 4.0
    min_s: float = 0.25
    factor: float = 3.0
    margin_s: float = 0.1
    unknown_s: float = 10.0  # the bound while no such prompt was measured
    quantile: float = 0.9


class HedgeBudget:
    """Hold a bucket of hedges that requests fill, not time: at most `share` of the requests are hedged, and `burst` at once."""

    def __init__(self, limits: HedgeLimits) -> None:
        self._limits = limits
        self._tokens = limits.burst if limits.share else 0.0

    def earn(self) -> None:
        """Record that a request has gone to a prefill worker."""
        self._tokens = min(self._limits.burst, self._tokens + self._limits.share)

    @property
    def has_one(self) -> bool:
        """Return whether one may be hedged now."""
        return bool(self._limits.share) and self._tokens >= 1

    def spend(self) -> bool:
        """Return whether one may be hedged, and count it."""
        if not self.has_one:
            return False
        self._tokens -= 1
        return True


class PrefillTimes:
    """Hold the seconds from the Prefill call to its first tokens, queue included, by prompt length in powers of two."""

    def __init__(self) -> None:
        self._by_length: dict[int, deque[float]] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record one prompt of which `num_tokens` had to be computed."""
        self._by_length.setdefault(_length_class(num_tokens), deque(maxlen=SAMPLES_PER_LENGTH)).append(seconds)

    def quantile(self, num_tokens: int, quantile: float) -> float | None:
        """Return the quantile for prompts of about that length, else scaled from the nearest shorter ones, or from longer ones
        unscaled; None without any."""
        wanted = _length_class(num_tokens)
        known = [length for length, times in self._by_length.items() if len(times) >= MIN_SAMPLES]
        if not known:
            return None
        nearest = min(known, key=lambda length: (abs(length - wanted), length))
        times = sorted(self._by_length[nearest])
        at = times[min(len(times) - 1, int(quantile * len(times)))]
        return float(at * 2 ** max(0, wanted - nearest))


@dataclass(eq=False)
class Hedging:
    """Hold what one router knows of prefill times, and its budget for hedges."""

    limits: HedgeLimits = field(default_factory=HedgeLimits)
    times: PrefillTimes = field(default_factory=PrefillTimes)
    budget: HedgeBudget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = HedgeBudget(self.limits)

    def expected_s(self, num_tokens: int) -> float | None:
        """Return the usual time to first tokens, the median; None while too little is known."""
        return self.times.quantile(num_tokens, 0.5)

    def bound_s(self, num_tokens: int, predicted_s: float | None) -> float:
        """Return how long first tokens may take. `predicted_s`: what the policy expected; None: nothing."""
        usual_s = predicted_s if predicted_s is not None else self.times.quantile(num_tokens, self.limits.quantile)
        if usual_s is None:
            return self.limits.unknown_s
        return max(self.limits.min_s, usual_s * self.limits.factor + self.limits.margin_s)

    def may_hedge(self, waited_s: float, bound_s: float, *, silent: bool) -> bool:
        """Return whether it is time to hedge. A yes is taken out of the budget. `silent`: no heartbeat of the worker came for too
        long."""
        if not self.limits.share or waited_s < self.limits.min_s:
            return False
        return silent or (waited_s >= bound_s and self.budget.spend())


def _length_class(num_tokens: int) -> int:
    return max(1, num_tokens).bit_length()
