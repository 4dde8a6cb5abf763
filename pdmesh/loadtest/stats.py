"""Computes figures and time lines from records. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome, Record
from pdmesh.loadtest.targets.target import Fleet

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Window:
    """Bound the part of a run that counts: requests that were due from `start_s` until `end_s`."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, record: Record) -> bool:
        return self.start_s <= record.scheduled_s < self.end_s and record.outcome is not Outcome.ABORTED


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile of a sorted, not empty sample, interpolated linearly (Hyndman and Fan 1996, definition 7)."""
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class Latency:
    """Summarize a sample of durations, in milliseconds; all 0 without values."""

    num_values: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @staticmethod
    def of(values_s: Iterable[float | None]) -> Latency:
        """Return the summary of durations in seconds; None is left out."""
        ordered = sorted(1e3 * value for value in values_s if value is not None)
        if not ordered:
            return Latency()
        p50, p90, p95, p99 = (quantile(ordered, q) for q in QUANTILES)
        return Latency(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


# What is measured of each request, in seconds.
METRICS: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
}


def met(record: Record, objectives: Objectives) -> bool | None:
    """Return whether a request kept its objectives. Answered in full: by its latencies. Cancelled by plan: None (it does not
    count) unless its first token was late already. Everything else missed them."""
    if record.outcome is Outcome.CANCELLED:
        waited_s = record.end_s - record.scheduled_s if record.ttft_s is None else record.ttft_s
        late = objectives.ttft_ms is not None and 1e3 * waited_s > objectives.ttft_ms
        return False if late else None
    if record.outcome is not Outcome.OK:
        return False
    measured = ((METRICS[name](record), bound) for name, bound in objectives.bounds.items())
    return all(value is None or 1e3 * value <= bound for value, bound in measured)


@dataclass(frozen=True)
class Summary:
    """Summarize a set of requests. Rates are per second of the window; latencies in milliseconds."""

    num_requests: int
    outcomes: Mapping[str, int]
    errors: Mapping[str, int]
    request_rate: float
    output_token_rate: float
    goodput: float
    attainment: float | None
    attained: bool | None
    ttft: Latency
    ttft_from_sent: Latency
    tpot: Latency
    itl: Latency
    e2e: Latency
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    # As planned, and how many of them a cache could hold; 0 in results of before they were counted.
    prompt_tokens: int = 0
    reusable_tokens: int = 0

    @property
    def reusable_share(self) -> float | None:
        """Return the ideal hit ratio of a cache: the share of prompt tokens that were those of earlier prompts and answers."""
        return self.reusable_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def cached_share(self) -> float | None:
        """Return the hit ratio that the server reports."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else None


def summarise(records: Sequence[Record], window: Window, book: ObjectiveBook) -> Summary:
    """Return the summary of the requests that were due within `window`. Attainment is None if no request counts for or against
    it."""
    counted = [record for record in records if window.holds(record)]
    verdicts = [verdict for record in counted if (verdict := met(record, book.of(record.traffic_class))) is not None]
    attainment = sum(verdicts) / len(verdicts) if verdicts else None
    quantiles = {book.of(record.traffic_class).quantile for record in counted}
    received = sum(_tokens_before(record, window.end_s) for record in counted)
    return Summary(
        num_requests=len(counted),
        outcomes=dict(Counter(record.outcome.value for record in counted)),
        errors=dict(Counter(record.error for record in counted if record.error).most_common(20)),
        request_rate=len(counted) / window.length_s,
        output_token_rate=received / window.length_s,
        goodput=sum(verdicts) / window.length_s,
        attainment=attainment,
        attained=None if attainment is None or not book.any else attainment >= max(quantiles),
        ttft=Latency.of(record.ttft_s for record in counted),
        ttft_from_sent=Latency.of(record.ttft_from_sent_s for record in counted),
        tpot=Latency.of(record.tpot_s for record in counted),
        itl=Latency.of(gap for record in counted for gap in record.gaps_s),
        e2e=Latency.of(record.e2e_s for record in counted),
        input_tokens=sum(record.input_tokens for record in counted),
        output_tokens=sum(record.output_tokens for record in counted),
        cached_tokens=sum(record.cached_tokens for record in counted),
        phases_ms=mean_phases(counted),
        prompt_tokens=sum(record.prompt_tokens for record in counted),
        reusable_tokens=sum(record.reusable_tokens for record in counted),
    )


def mean_phases(records: Sequence[Record]) -> dict[str, float]:
    """Return the mean of each phase that the server named, in milliseconds, over the requests that have phases."""
    measured = [record.phases_ms for record in records if record.phases_ms]
    names = dict.fromkeys(name for phases in measured for name in phases)
    return {name: math.fsum(phases.get(name, 0.0) for phases in measured) / len(measured) for name in names}


def by(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Return records by their `key`, in the order of the keys."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return dict(sorted(groups.items()))


# Sessions of several turns.


FIRST_TURNS, LATER_TURNS = "first", "later"
_FAILED = (Outcome.REFUSED, Outcome.TIMEOUT, Outcome.ERROR, Outcome.NOT_SENT)


@dataclass(frozen=True)
class Sessions:
    """Count the sessions with a turn in the window. Complete: every turn was answered; broken: one failed, so that those behind
    it (`num_turns_lost`) were not sent; cancelled: one was, by plan; cut off: the run ended before it did. `held`: how long turns
    of a trace were held that were due before the turn before them had ended; milliseconds."""

    num_complete: int = 0
    num_broken: int = 0
    num_cancelled: int = 0
    num_cut_off: int = 0
    num_turns_lost: int = 0
    held: Latency = field(default_factory=Latency)

    @property
    def num_sessions(self) -> int:
        return self.num_complete + self.num_broken + self.num_cancelled + self.num_cut_off


def count_sessions(records: Sequence[Record], window: Window) -> Sessions | None:
    """Return how the sessions ended, from the records of a whole run; None if no session had several turns."""
    if all(record.num_turns == 1 for record in records):
        return None
    sessions: dict[int, list[Record]] = {}
    for record in records:
        sessions.setdefault(record.session, []).append(record)
    counted = [session for session in sessions.values() if any(map(window.holds, session))]
    ended = Counter(map(_end_of_session, counted))
    lost = sum(session[0].num_turns - len(session) for session in counted if _end_of_session(session) is Outcome.ERROR)
    return Sessions(
        num_complete=ended[Outcome.OK],
        num_broken=ended[Outcome.ERROR],
        num_cancelled=ended[Outcome.CANCELLED],
        num_cut_off=ended[Outcome.ABORTED],
        num_turns_lost=lost,
        held=Latency.of(record.held_s for record in records if window.holds(record)),
    )


def _end_of_session(turns: Sequence[Record]) -> Outcome:
    outcomes = {record.outcome for record in turns}
    if outcomes & set(_FAILED):
        return Outcome.ERROR
    if Outcome.CANCELLED in outcomes:
        return Outcome.CANCELLED
    return Outcome.OK if outcomes == {Outcome.OK} and len(turns) == turns[0].num_turns else Outcome.ABORTED


@dataclass(frozen=True)
class TurnPoint:
    """Hold the requests that were turn number `turn` of their session, from 1: TTFT in milliseconds (None: no first token came),
    tokens of prompts, how many of them could be reused, and how many the server says were cached (of `input_tokens`)."""

    turn: int
    num_requests: int
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    prompt_tokens: int
    reusable_tokens: int
    input_tokens: int
    cached_tokens: int


def by_turn(counted: Sequence[Record]) -> list[TurnPoint]:
    """Return a point for each turn number, in order; none if no session had several turns."""
    if all(record.num_turns == 1 for record in counted):
        return []
    groups: dict[int, list[Record]] = {}
    for record in counted:
        groups.setdefault(record.depth, []).append(record)
    return [_turn_point(depth + 1, groups[depth]) for depth in sorted(groups)]


def _turn_point(turn: int, records: Sequence[Record]) -> TurnPoint:
    ttft = _sorted_ms(records, lambda record: record.ttft_s)
    return TurnPoint(
        turn=turn,
        num_requests=len(records),
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p90=_quantile(ttft, 0.9),
        ttft_p99=_quantile(ttft, 0.99),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        reusable_tokens=sum(record.reusable_tokens for record in records),
        input_tokens=sum(record.input_tokens for record in records),
        cached_tokens=sum(record.cached_tokens for record in records),
    )


def phases_of_slowest(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return mean phases of all requests, of the slowest tenth and of the slowest hundredth by TTFT."""
    ordered = sorted((r for r in records if r.phases_ms and r.ttft_s is not None), key=lambda r: r.ttft_s or 0.0)
    shares = {"all": 1.0, "slowest 10 %": 0.1, "slowest 1 %": 0.01}
    return {name: mean_phases(ordered[-max(1, round(share * len(ordered))) :]) for name, share in shares.items() if ordered}


def slowest(records: Sequence[Record], number: int) -> list[Record]:
    """Return the requests that took longest, from when they were due to their end; unanswered ones count with the time that they
    waited. Requests that were cancelled by plan or never sent are left out."""
    left_out = (Outcome.CANCELLED, Outcome.NOT_SENT, Outcome.ABORTED)
    ended = [record for record in records if record.outcome not in left_out]
    return sorted(ended, key=lambda record: record.scheduled_s - record.end_s)[:number]


def _tokens_before(record: Record, end_s: float) -> float:
    """Return the tokens that had come by then; messages hold about equally many."""
    times = record.token_times
    return record.output_tokens * sum(at_s < end_s for at_s in times) / len(times) if times else 0.0


# The time line of a run.


MAX_BINS = 240
_MIN_BINS = 30
_WANTED_PER_BIN = 5


@dataclass(frozen=True)
class Bin:
    """Hold one step of the time line, from `at_s` on. Rates per second. `due`, `good`, `failed` and the latencies (milliseconds;
    None without a request) belong to the requests that were due in it; `completed` counts those that ended in it, `running` those
    that ran at its start."""

    at_s: float
    due: float
    completed: float
    good: float
    failed: float
    running: int
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None


@dataclass(frozen=True)
class FleetPoint:
    """Hold the fleet at `at_s`."""

    at_s: float
    num_prefill: int
    num_decode: int
    num_inflight: int
    num_queued: int

    @staticmethod
    def of(at_s: float, fleet: Fleet) -> FleetPoint:
        return FleetPoint(round(at_s, 2), fleet.num_prefill, fleet.num_decode, fleet.num_inflight, fleet.num_queued)


def timeline(records: Sequence[Record], book: ObjectiveBook) -> list[Bin]:
    """Return steps of a second, or longer ones: at most MAX_BINS, and with few requests, long enough that most steps have
    some."""
    records = [record for record in records if record.outcome is not Outcome.ABORTED]
    if not records:
        return []
    end_s = max(record.end_s for record in records)
    step_s = _step_s(end_s, len(records))
    number = int(end_s // step_s) + 1
    due: list[list[Record]] = [[] for _ in range(number)]
    completed, started = [0] * number, [0] * number
    for record in records:
        due[int(record.scheduled_s // step_s)].append(record)
        ended = int(record.end_s // step_s)
        completed[ended] += record.outcome is Outcome.OK
        started[int(record.scheduled_s // step_s)] += 1
        started[ended] -= 1
    bins, running = [], 0
    for index in range(number):
        bins.append(_bin(index * step_s, step_s, due[index], completed[index], running, book))
        running += started[index]
    return bins


def _step_s(end_s: float, num_requests: int) -> int:
    """Return the length of a step: one request says little about a share, but a few dozen steps show more than a handful."""
    for_requests = min(_WANTED_PER_BIN * end_s / num_requests, end_s / _MIN_BINS)
    return max(1, math.ceil(end_s / MAX_BINS), math.ceil(for_requests))


def _bin(at_s: float, step_s: float, due: Sequence[Record], completed: int, running: int, book: ObjectiveBook) -> Bin:
    ttft, tpot = _sorted_ms(due, lambda record: record.ttft_s), _sorted_ms(due, lambda record: record.tpot_s)
    return Bin(
        at_s=at_s,
        due=len(due) / step_s,
        completed=completed / step_s,
        good=sum(met(record, book.of(record.traffic_class)) is True for record in due) / step_s,
        failed=sum(record.outcome in _FAILED for record in due) / step_s,
        running=running,
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p99=_quantile(ttft, 0.99),
        tpot_p50=_quantile(tpot, 0.5),
        tpot_p99=_quantile(tpot, 0.99),
    )


def _sorted_ms(records: Sequence[Record], value_s: Callable[[Record], float | None]) -> list[float]:
    return sorted(1e3 * value for record in records if (value := value_s(record)) is not None)


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return round(quantile(ordered, q), 3) if ordered else None
