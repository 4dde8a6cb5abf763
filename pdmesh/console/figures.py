"""Aggregates the requests of the window: distributions against objectives, flows between workers, rates. Pure."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pdmesh.console.store import RequestSummary

# Histograms of durations: classes grow by a constant factor, so that 5 ms and 5 s fit on one axis.


CLASSES_PER_DECADE = 10
MAX_CLASSES = 40
_LEAST_MS = 1e-3


@dataclass(frozen=True)
class Class:
    """Count durations from `from_ms` up to, but without, `to_ms`; `missed` of the `count` broke their objective."""

    from_ms: float
    to_ms: float
    count: int
    missed: int


def classes(durations_ms: Sequence[tuple[float, bool]]) -> list[Class]:
    """Return classes of (duration, whether it broke its objective), without gaps from the shortest to the longest; at most
    MAX_CLASSES, wider if needed. Empty for none."""
    if not durations_ms:
        return []
    exponents = [math.log10(max(_LEAST_MS, duration)) for duration, _ in durations_ms]
    per_decade = _per_decade(min(exponents), max(exponents))
    first, last = _number(min(exponents), per_decade), _number(max(exponents), per_decade)
    counts = [[0, 0] for _ in range(last - first + 1)]
    for exponent, (_, is_missed) in zip(exponents, durations_ms, strict=True):
        counted = counts[_number(exponent, per_decade) - first]
        counted[0] += 1
        counted[1] += is_missed
    edges = [10 ** ((first + index) / per_decade) for index in range(len(counts) + 1)]
    return [Class(edges[index], edges[index + 1], *counted) for index, counted in enumerate(counts)]


def quantile(sorted_values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of them do not exceed (nearest rank); None for none."""
    if not sorted_values:
        return None
    return sorted_values[max(0, math.ceil(share * len(sorted_values)) - 1)]


def _per_decade(least: float, most: float) -> int:
    for per_decade in range(CLASSES_PER_DECADE, 1, -1):
        if _number(most, per_decade) - _number(least, per_decade) < MAX_CLASSES:
            return per_decade
    return 1


def _number(exponent: float, per_decade: int) -> int:
    # Edges are powers of ten: a value on an edge must not fall below it by rounding.
    return math.floor(exponent * per_decade + 1e-9)


Metric = Literal["ttft_ms", "tpot_ms"]
METRICS: tuple[Metric, ...] = ("ttft_ms", "tpot_ms")
FLOW_WINDOW_S = 10.0
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


MAX_MODELS, OTHERS = 64, "(others)"


@dataclass(frozen=True)
class Query:
    """Select requests of a model whose `metric` is from `from_ms` up to, but without, `to_ms`."""

    model: str
    metric: Metric
    from_ms: float
    to_ms: float

    def takes(self, request: RequestSummary) -> bool:
        """Return whether the request is selected."""
        value = duration(request, self.metric)
        return request.model == self.model and value is not None and self.from_ms <= value < self.to_ms


def duration(request: RequestSummary, metric: Metric) -> float | None:
    """Return the duration in milliseconds."""
    return request.ttft_ms if metric == "ttft_ms" else request.tpot_ms


def is_missed(request: RequestSummary, metric: Metric) -> bool:
    """Return whether it broke the objective of this metric."""
    value = duration(request, metric)
    bound = request.objective_ttft_ms if metric == "ttft_ms" else request.objective_tpot_ms
    return value is not None and bound is not None and value > bound


def by_model(requests: Iterable[RequestSummary]) -> list[dict[str, Any]]:
    """Return the distributions and SLO attainment of each model; models with the fewest requests are merged when there are more
    names than a page can show."""
    groups: dict[str, list[RequestSummary]] = defaultdict(list)
    for request in requests:
        groups[request.model].append(request)
    for model in sorted(groups, key=lambda model: -len(groups[model]))[MAX_MODELS:]:
        groups[OTHERS] += groups.pop(model)
    return [_of_model(model, group) for model, group in sorted(groups.items())]


def _of_model(model: str, requests: Sequence[RequestSummary]) -> dict[str, Any]:
    judged = [request for request in requests if request.met is not None]
    return {
        "name": model,
        "num_requests": len(requests),
        "num_errors": sum(bool(request.error) for request in requests),
        "num_judged": len(judged),
        "num_met": sum(bool(request.met) for request in judged),
        **{metric: _distribution(requests, metric) for metric in METRICS},
    }


def _distribution(requests: Sequence[RequestSummary], metric: Metric) -> dict[str, Any]:
    timed = [(value, is_missed(request, metric)) for request in requests if (value := duration(request, metric)) is not None]
    values = sorted(value for value, _ in timed)
    return {
        "count": len(values),
        **{name: quantile(values, share) for name, share in QUANTILES.items()},
        "classes": [asdict(each) for each in classes(timed)],
    }


def latest(requests: Iterable[RequestSummary], now_s: float) -> list[RequestSummary]:
    """Return the requests that ended within FLOW_WINDOW_S."""
    return [request for request in requests if now_s - request.end_s <= FLOW_WINDOW_S]


def flows(ended: Iterable[RequestSummary]) -> list[dict[str, Any]]:
    """Return the paths of the `latest` requests: router, prefill worker ("" if the decode worker computed the prompt), decode
    worker; requests and KV bytes per second."""
    counts, moved = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for request in ended:
        if request.decode_worker:
            way = (request.router, request.prefill_worker if request.mode == "remote" else "", request.decode_worker)
            counts[way] += 1
            moved[way] += request.kv_bytes
    return [
        {
            "router": way[0],
            "prefill": way[1],
            "decode": way[2],
            "per_s": count / FLOW_WINDOW_S,
            "kv_bytes_per_s": moved[way] / FLOW_WINDOW_S,
        }
        for way, count in sorted(counts.items())
    ]


def rates(ended: Sequence[RequestSummary]) -> dict[str, float]:
    """Return rates of the `latest` requests, per second."""
    return {
        "requests_per_s": len(ended) / FLOW_WINDOW_S,
        "errors_per_s": sum(bool(request.error) for request in ended) / FLOW_WINDOW_S,
        "output_tokens_per_s": sum(request.output_tokens for request in ended) / FLOW_WINDOW_S,
    }


def slowest(requests: Iterable[RequestSummary], limit: int) -> list[RequestSummary]:
    """Return the requests with the longest time to the first token, slowest first."""
    timed = [request for request in requests if request.ttft_ms is not None]
    return heapq.nlargest(limit, timed, key=lambda request: request.ttft_ms or 0.0)
