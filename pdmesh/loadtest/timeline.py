"""A run step by step. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.loadtest.objectives import ObjectiveBook
from pdmesh.loadtest.record import Outcome, Record
from pdmesh.loadtest.stats import met, quantile
from pdmesh.loadtest.targets.target import Fleet

MAX_BINS = 240
_MIN_BINS = 30
_WANTED_PER_BIN = 5
_FAILED = (Outcome.REFUSED, Outcome.TIMEOUT, Outcome.ERROR, Outcome.NOT_SENT)


@dataclass(frozen=True)
class Bin:
    """One step of the time line, from `at_s` on. Rates per second. `due`, `good`, `failed` and the latencies (milliseconds; None
    without a request) belong to the requests that were due in it; `completed` counts those that ended in it, `running` those
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
    """What served at `at_s`."""

    at_s: float
    num_prefill: int
    num_decode: int
    num_inflight: int
    num_queued: int

    @staticmethod
    def of(at_s: float, fleet: Fleet) -> FleetPoint:
        return FleetPoint(round(at_s, 2), fleet.num_prefill, fleet.num_decode, fleet.num_inflight, fleet.num_queued)


def timeline(records: Sequence[Record], book: ObjectiveBook) -> list[Bin]:
    """Steps of a second, or longer ones: at most MAX_BINS, and where few requests came, some in most of them."""
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
    """A step with one request says little of a share of them, but a few dozen steps show more than a handful."""
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
