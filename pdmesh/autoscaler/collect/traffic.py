"""The traffic of the latest window, from the rounds in which all routers have answered. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from pdmesh.autoscaler.collect.collect_counts import Counts, Key, Round, total
from pdmesh.autoscaler.views import Measured, Traffic
from pdmesh.planning.capacity_load import Lengths
from pdmesh.planning.duration_histogram import quantile_s
from pdmesh.v1 import mesh_pb2

USUAL_GAPS = 10
"""So many gaps of independent arrivals are believed in before any were seen: the spread of a few says next to nothing."""

MIN_MEASURED = 8
"""Requests, without which no quantile of their latencies is told."""

MOST_CACHED = 0.99


def traffic_of(
    rounds: Iterable[Round], waiting: Collection[mesh_pb2.TrafficStatus], window_s: float, quantile: float, age_s: float
) -> Traffic | None:
    """Over the last `window_s` seconds at least, as far as rounds reach back; None before the first. `waiting`: what routers told
    last, for those who wait now."""
    window = _latest(list(rounds), window_s)
    if not window:
        return None
    by_router = _by_router(window)
    counts = total(by_router.values())
    seconds = sum(each.seconds for each in window)
    return Traffic(
        rate_per_s=counts.num_arrived / seconds,
        lengths=lengths_of(counts),
        window_s=seconds,
        burstiness=_burstiness(by_router.values()),
        num_queued=sum(told.num_queued for told in waiting),
        queue_wait_s=max((told.queue_wait_ms for told in waiting), default=0) / 1000,
        ttft=_measured(counts.ttft_observed, counts.ttft_predicted, quantile),
        tpot=_measured(counts.tpot_observed, counts.tpot_predicted, quantile),
        age_s=age_s,
    )


def _latest(rounds: Sequence[Round], window_s: float) -> list[Round]:
    """The last ones that together are at least as long, or all."""
    chosen: list[Round] = []
    for each in reversed(rounds):
        if sum(one.seconds for one in chosen) >= window_s:
            break
        chosen.append(each)
    return chosen


def _by_router(window: Iterable[Round]) -> dict[Key, Counts]:
    by_router: dict[Key, Counts] = {}
    for each in window:
        for key, counts in each.counts.items():
            by_router[key] = by_router.get(key, Counts()) + counts
    return by_router


def lengths_of(counts: Counts) -> Lengths | None:
    """Of the requests; None while nobody has come, or nobody has been answered."""
    if not counts.num_arrived or not counts.num_answered:
        return None
    inputs, outputs = (max(1.0, each) for each in (_mean(counts, "input", "arrived"), _mean(counts, "output", "answered")))
    cached = counts.cached_tokens / max(1.0, counts.answered_input_tokens)
    return Lengths(
        input_tokens=inputs,
        input_squared=max(inputs**2, counts.input_squared / counts.num_arrived),
        output_tokens=outputs,
        cached_share=min(MOST_CACHED, max(0.0, cached)),
        output_squared=max(outputs**2, counts.output_squared / counts.num_answered),
    )


def _mean(counts: Counts, tokens: str, requests: str) -> float:
    return float(getattr(counts, f"{tokens}_tokens") / getattr(counts, f"num_{requests}"))


def _burstiness(by_router: Iterable[Counts]) -> float:
    """Of all arrivals together: variances of counts add up, so the routers' own are weighted by how many came to each (the
    asymptotic method of Whitt, "Approximating a point process by a renewal process", 1982)."""
    arrivals, weighted = 0.0, 0.0
    for counts in by_router:
        arrivals += counts.num_arrived
        weighted += counts.num_arrived * _variation(counts)
    return weighted / arrivals if arrivals else 1.0


def _variation(counts: Counts) -> float:
    """The squared coefficient of variation of the gaps, with those that are believed in from the start."""
    if not counts.num_gaps or counts.gaps_s <= 0:
        return 1.0
    mean = counts.gaps_s / counts.num_gaps
    seen = max(0.0, counts.gaps_squared / counts.num_gaps / mean**2 - 1)
    return (counts.num_gaps * seen + USUAL_GAPS) / (counts.num_gaps + USUAL_GAPS)


def _measured(observed: Counter[int], predicted: Counter[int], quantile: float) -> Measured:
    if observed.total() < MIN_MEASURED:
        return Measured()
    return Measured(quantile_s(observed, quantile), quantile_s(predicted, quantile))
