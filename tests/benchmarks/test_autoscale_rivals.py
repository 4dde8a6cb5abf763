"""The rivals do what their documents say: their own examples, and tables."""

from __future__ import annotations

import pytest

from benchmarks.autoscale.rivals import DynamoPlanner, DynamoSettings, Fixed, Hpa, HpaSettings, Interval
from pdmesh.planning.capacity_load import Goals, Lengths, Limits, Worker
from pdmesh.planning.latency_model import LatencyModel

WORKER = Worker(LatencyModel(0.01, 1e-4, 0.0, 1e-3, 0.0), Limits(2048, 64, 10**6))
LENGTHS = Lengths(900, 810_000, 100)


def hpa(target: float = 0.5, **fields: int) -> Hpa:
    return Hpa(HpaSettings(target, max_replicas=100, **fields))


@pytest.mark.parametrize(
    ("utilization", "num_ready", "num_starting", "wanted"),
    [
        (1.0, 2, 0, 4),  # twice the metric: twice the pods
        (0.25, 4, 0, 4),  # half of it: but 4 were right a moment ago
        (0.54, 10, 0, 10),  # within the tolerance
        (0.56, 10, 0, 12),
        (1.0, 4, 4, 8),  # those that start count as if they used nothing: 4 would do
        (1.0, 4, 2, 8),
    ],
)
def test_hpa_on_utilization(utilization: float, num_ready: int, num_starting: int, wanted: int) -> None:
    scaler = hpa()
    scaler.by_utilization(0.0, 0.5, num_ready, num_starting)  # as many as there are were right a moment ago
    assert scaler.by_utilization(10.0, utilization, num_ready, num_starting) == wanted


def test_hpa_shrinks_to_the_highest_of_five_minutes() -> None:
    scaler = hpa()
    assert scaler.by_utilization(0.0, 0.5, 8, 0) == 8
    assert scaler.by_utilization(150.0, 0.25, 8, 0) == 8
    assert scaler.by_utilization(200.0, 0.375, 8, 0) == 8
    assert scaler.by_utilization(301.0, 0.25, 8, 0) == 6
    assert scaler.by_utilization(501.0, 0.25, 6, 0) == 4


def test_hpa_at_most_doubles_or_adds_four_in_fifteen_seconds() -> None:
    assert hpa().by_queue(0.0, 100.0, 2) == 6
    scaler = hpa()
    assert scaler.by_queue(0.0, 100.0, 10) == 20
    assert scaler.by_queue(10.0, 100.0, 20) == 20
    assert scaler.by_queue(16.0, 100.0, 20) == 40


def test_hpa_on_a_queue() -> None:
    assert hpa(5.0).by_queue(0.0, 52.0, 10) == 10  # 5.2 each: within the tolerance
    assert hpa(5.0).by_queue(0.0, 61.0, 10) == 13
    assert hpa(5.0, min_replicas=3).by_queue(0.0, 0.0, 3) == 3
    assert hpa(5.0).by_queue(0.0, 12.0, 0) == 3


def test_fixed() -> None:
    assert Fixed(7).decide(1e9) == 7


def planner(**fields: object) -> DynamoPlanner:
    return DynamoPlanner(DynamoSettings(WORKER, WORKER, Goals(ttft_s=0.5, tpot_s=0.03), **fields))  # type: ignore[arg-type]


def test_dynamo_counts_tokens() -> None:
    """A prompt of 900 tokens takes 0.1 s: 9000 tokens/s. 20 sequences have steps of 30 ms: 667 tokens/s."""
    scaler = planner()
    assert scaler.prefill_tokens_per_s(LENGTHS) == pytest.approx(9000)
    assert scaler.decode_tokens_per_s(LENGTHS, 1.0) == pytest.approx(20 / 0.03)
    assert scaler.decide(Interval(180 * 35, LENGTHS), 6) == (4, 6)


def test_dynamo_corrects_prefill_down_and_decode_both_ways() -> None:
    """A queue that makes TTFT ten times as long asks for no prefill replica more: min(1, correction)."""
    late = Interval(180 * 35, LENGTHS, ttft_s=1.0)
    assert planner().decide(late, 6) == (4, 6)
    early = Interval(180 * 35, LENGTHS, ttft_s=0.05)
    assert planner().decide(early, 6) == (2, 6)
    assert planner(has_correction=False).decide(early, 6) == (4, 6)
    # 35 · 100 tokens/s in 6 engines at 40 ms each: 23.3 at once, of which a step takes 33.3 ms. So the goal is 30 / 1.2 ms.
    slow = Interval(180 * 35, LENGTHS, itl_s=0.04)
    assert planner().decide(slow, 6) == (4, 6)
    assert planner().decode_tokens_per_s(LENGTHS, 1.2) == pytest.approx(15 / 0.025)


def test_dynamo_keeps_bounds() -> None:
    assert planner(max_replicas=3).decide(Interval(180 * 1000, LENGTHS), 3) == (3, 3)
    assert planner(min_replicas=2).decide(Interval(0, LENGTHS), 2) == (2, 2)
    assert planner().decode_tokens_per_s(LENGTHS, 100.0) == pytest.approx(1 / 0.011)
