"""When a prompt that a prefill worker does not answer is given to somebody else. Pure: time and measurements are passed in.

A decode reservation has one attempt in force at a time. So a hedge moves on: the next attempt fences the one before, whose worker
is told to stop; if that one has committed meanwhile, decode refuses the next attempt, and the one before has won after all.

Hedges cost work that was done in vain, and under overload everybody is late: they come out of a budget that requests fill. Only a
worker that has fallen silent, which will not answer any sooner, may be left without one.
"""

from collections import deque
from dataclasses import dataclass, field

SAMPLES_PER_LENGTH = 64
MIN_SAMPLES = 4


@dataclass(frozen=True)
class HedgeLimits:
    """`share`: hedges for each request that goes to a prefill worker, 0 switches them off. Times are seconds."""

    share: float = 0.05
    burst: float = 4.0
    min_s: float = 0.25
    factor: float = 3.0
    margin_s: float = 0.1
    unknown_s: float = 10.0  # the bound while nothing is known of such prompts
    quantile: float = 0.9


class HedgeBudget:
    """A bucket of hedges that is filled by requests, not by time: at most `share` of them, and `burst` at once."""

    def __init__(self, limits: HedgeLimits) -> None:
        self._limits = limits
        self._tokens = limits.burst if limits.share else 0.0

    def earn(self) -> None:
        """A request has gone to a prefill worker."""
        self._tokens = min(self._limits.burst, self._tokens + self._limits.share)

    def spend(self) -> bool:
        """May one be hedged? If so, it is counted."""
        if self._tokens < 1 or not self._limits.share:
            return False
        self._tokens -= 1
        return True


class PrefillTimes:
    """Seconds from the Prefill call to its first tokens, queue included, by prompt length in powers of two."""

    def __init__(self) -> None:
        self._by_length: dict[int, deque[float]] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        """One prompt of which `num_tokens` had to be computed."""
        self._by_length.setdefault(_length_class(num_tokens), deque(maxlen=SAMPLES_PER_LENGTH)).append(seconds)

    def quantile(self, num_tokens: int, quantile: float) -> float | None:
        """Of prompts of about that length, else of the nearest shorter ones in proportion or of longer ones as they are; None
        without any."""
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
    """What one router knows of prefill times, and what it may still spend."""

    limits: HedgeLimits = field(default_factory=HedgeLimits)
    times: PrefillTimes = field(default_factory=PrefillTimes)
    budget: HedgeBudget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = HedgeBudget(self.limits)

    def expected_s(self, num_tokens: int) -> float | None:
        """The usual time to first tokens, the median; None while too little is known."""
        return self.times.quantile(num_tokens, 0.5)

    def bound_s(self, num_tokens: int, predicted_s: float | None) -> float:
        """How long first tokens may take. `predicted_s`: what the policy expected, if it did."""
        usual_s = predicted_s if predicted_s is not None else self.times.quantile(num_tokens, self.limits.quantile)
        if usual_s is None:
            return self.limits.unknown_s
        return max(self.limits.min_s, usual_s * self.limits.factor + self.limits.margin_s)

    def may_hedge(self, waited_s: float, bound_s: float, *, silent: bool) -> bool:
        """Is it time to move on? A yes out of the budget is counted; `silent`: the worker has not been heard of for too long."""
        if not self.limits.share or waited_s < self.limits.min_s:
            return False
        return silent or (waited_s >= bound_s and self.budget.spend())


def _length_class(num_tokens: int) -> int:
    return max(1, num_tokens).bit_length()
