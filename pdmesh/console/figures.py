"""What the requests of the window say together: distributions against objectives, flows between workers, rates. Pure."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pdmesh.console.histogram import classes, quantile
from pdmesh.console.summary import RequestSummary

Metric = Literal["ttft_ms", "tpot_ms"]
METRICS: tuple[Metric, ...] = ("ttft_ms", "tpot_ms")
FLOW_WINDOW_S = 10.0
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


MAX_MODELS, OTHERS = 64, "(others)"


@dataclass(frozen=True)
class Query:
    """Requests of a model whose `metric` is from `from_ms` up to, but without, `to_ms`."""

    model: str
    metric: Metric
    from_ms: float
    to_ms: float

    def takes(self, request: RequestSummary) -> bool:
        """Whether it is one of them."""
        value = duration(request, self.metric)
        return request.model == self.model and value is not None and self.from_ms <= value < self.to_ms


def duration(request: RequestSummary, metric: Metric) -> float | None:
    """In milliseconds."""
    return request.ttft_ms if metric == "ttft_ms" else request.tpot_ms


def is_missed(request: RequestSummary, metric: Metric) -> bool:
    """Whether it broke what was promised for this figure."""
    value = duration(request, metric)
    bound = request.objective_ttft_ms if metric == "ttft_ms" else request.objective_tpot_ms
    return value is not None and bound is not None and value > bound


def by_model(requests: Iterable[RequestSummary]) -> list[dict[str, Any]]:
    """Of each model its distributions and how many requests kept their objectives; those with the fewest requests together,
    where anybody has sent more names than a page can show."""
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
    """Those that ended within FLOW_WINDOW_S."""
    return [request for request in requests if now_s - request.end_s <= FLOW_WINDOW_S]


def flows(ended: Iterable[RequestSummary]) -> list[dict[str, Any]]:
    """Which way the `latest` requests went: router, prefill worker ("" where decode computed the prompt), decode worker;
    requests and KV bytes per second."""
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
    """Of the `latest` requests, per second."""
    return {
        "requests_per_s": len(ended) / FLOW_WINDOW_S,
        "errors_per_s": sum(bool(request.error) for request in ended) / FLOW_WINDOW_S,
        "output_tokens_per_s": sum(request.output_tokens for request in ended) / FLOW_WINDOW_S,
    }


def slowest(requests: Iterable[RequestSummary], limit: int) -> list[RequestSummary]:
    """By the time to the first token, the slowest first."""
    timed = [request for request in requests if request.ttft_ms is not None]
    return heapq.nlargest(limit, timed, key=lambda request: request.ttft_ms or 0.0)
