"""What routers together tell an autoscaler: counters that only grow, as `TrafficStatus` of protos/v1/mesh.proto has them, and who
waits. Nothing that a real router would not know."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields

from autoscaler.views import Measured, Traffic
from planning.capacity_load import Lengths
from simulator.mesh import Audience
from simulator.request import End, Request


@dataclass
class Totals:
    """Since the beginning; the difference of two is what happened between them."""

    num_arrived: float = 0.0
    input_tokens: float = 0.0
    input_squared: float = 0.0
    num_gaps: float = 0.0
    gaps_s: float = 0.0
    gaps_squared: float = 0.0
    num_answered: float = 0.0
    output_tokens: float = 0.0
    output_squared: float = 0.0
    answered_input_tokens: float = 0.0
    cached_tokens: float = 0.0
    ttft_s: float = 0.0
    num_spaced: float = 0.0
    tpot_s: float = 0.0

    def copy(self) -> "Totals":
        """As they are now."""
        return Totals(*_values(self))

    def since(self, before: "Totals") -> "Totals":
        """What happened since then."""
        return Totals(*(now - then for now, then in zip(_values(self), _values(before), strict=True)))

    @property
    def lengths(self) -> Lengths | None:
        """Of the requests; None without any. Outputs are those of requests that have ended, one token where none has."""
        if self.num_arrived < 1:
            return None
        answered = max(1.0, self.num_answered)
        output = max(1.0, self.output_tokens / answered)
        squared = max(output**2, self.output_squared / answered)
        cached = self.cached_tokens / self.answered_input_tokens if self.answered_input_tokens else 0.0
        mean = self.input_tokens / self.num_arrived
        return Lengths(mean, max(mean**2, self.input_squared / self.num_arrived), output, min(0.99, cached), squared)

    @property
    def burstiness(self) -> float:
        """The squared coefficient of variation of the gaps; 1 where too few are known."""
        if self.num_gaps < 2 or self.gaps_s <= 0:
            return 1.0
        mean = self.gaps_s / self.num_gaps
        return max(0.0, self.gaps_squared / self.num_gaps / mean**2 - 1)


class Watch:
    """Hears of every request, and passes it on. Latencies are those of requests that went smoothly, from the policy's decision
    on, kept for `latency_window_s`."""

    def __init__(self, audience: Audience, latency_window_s: float = 60.0) -> None:
        self.totals = Totals()
        self._audience, self._latency_window_s = audience, latency_window_s
        self._ttft: deque[tuple[float, float, float]] = deque()
        self._tpot: deque[tuple[float, float, float]] = deque()
        self._undecided: deque[Request] = deque()
        self._ended: set[Request] = set()
        self._latest_s: float | None = None

    def arrived(self, request: Request) -> None:
        """It is at a router."""
        totals, at_s, num = self.totals, request.arrival.at_s, request.num_input
        totals.num_arrived += 1
        totals.input_tokens += num
        totals.input_squared += num * num
        if self._latest_s is not None:
            gap_s = at_s - self._latest_s
            totals.num_gaps += 1
            totals.gaps_s += gap_s
            totals.gaps_squared += gap_s * gap_s
        self._latest_s = at_s
        self._undecided.append(request)
        self._audience.arrived(request)

    def ended(self, request: Request, end: End, now: float) -> None:
        """It is over."""
        if end is End.COMPLETED:
            self._count(request, now)
        if request.decided_at is None:
            self._ended.add(request)
        self._audience.ended(request, end, now)

    def queue_wait_s(self, now: float) -> float:
        """For which the first of those has waited that wait at routers."""
        queue = self._undecided
        while queue and (queue[0].decided_at is not None or queue[0] in self._ended):
            self._ended.discard(queue.popleft())
        return now - queue[0].arrival.at_s if queue else 0.0

    def traffic(self, now: float, before: Totals, window_s: float, num_queued: int, quantile: float) -> Traffic:
        """As the autoscaler's policy wants it; `before`: the totals of `window_s` ago."""
        seen = self.totals.since(before)
        ttft, tpot = (self._measured(known, now, quantile) for known in (self._ttft, self._tpot))
        return Traffic(
            rate_per_s=seen.num_arrived / window_s,
            lengths=self._with_outputs(seen).lengths,
            window_s=window_s,
            burstiness=seen.burstiness,
            num_queued=num_queued,
            queue_wait_s=self.queue_wait_s(now),
            ttft=ttft,
            tpot=tpot,
        )

    def _with_outputs(self, seen: Totals) -> Totals:
        """Outputs of the window, of all time where nobody has ended in it."""
        if seen.num_answered:
            return seen
        outputs = ("num_answered", "output_tokens", "output_squared", "answered_input_tokens", "cached_tokens")
        for name in outputs:
            setattr(seen, name, getattr(self.totals, name))
        return seen

    def _count(self, request: Request, now: float) -> None:
        totals, num = self.totals, request.num_output
        totals.num_answered += 1
        totals.output_tokens += num
        totals.output_squared += num * num
        totals.answered_input_tokens += request.num_input
        totals.cached_tokens += request.num_cached
        totals.ttft_s += request.ttft_s or 0.0
        if request.tpot_s is not None:
            totals.num_spaced += 1
            totals.tpot_s += request.tpot_s
        predicted, first_s, decided_s = request.prediction, request.first_at, request.decided_at
        if predicted is None or first_s is None or decided_s is None or request.num_resubmissions:
            return
        self._ttft.append((now, first_s - decided_s, predicted.ttft_s))
        if request.tpot_s is not None:
            self._tpot.append((now, request.tpot_s, predicted.tpot_s))

    def _measured(self, known: deque[tuple[float, float, float]], now: float, quantile: float) -> Measured:
        while known and known[0][0] < now - self._latency_window_s:
            known.popleft()
        if not known:
            return Measured()
        rank = min(len(known) - 1, int(quantile * len(known)))
        observed, predicted = sorted(each[1] for each in known), sorted(each[2] for each in known)
        return Measured(observed[rank], predicted[rank])


def _values(totals: Totals) -> Iterator[float]:
    return (getattr(totals, name) for name in _NAMES)


_NAMES = tuple(field.name for field in fields(Totals))
