"""Capacity against small simulations, against formulas that are exact, and against common sense."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.planning import prompt_times
from pdmesh.planning.capacity import DecodePool, Pool, PrefillPool, SharedPool, bearable, concurrency, fewest, keeps
from pdmesh.planning.capacity_load import NUM_POINTS, Goals, Lengths, Limits, Load, Worker
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.planning.prompt_times import erlang_c, times_alone, waiting

MODEL = LatencyModel(8e-3, 6e-5, 2e-9, 2e-4, 3e-8)
WORKER = Worker(MODEL, Limits(2048, 128, 400_000))
LENGTHS = Lengths(1000, 2.0e6, 200)
GOALS = Goals(ttft_s=0.5, tpot_s=0.03, quantile=0.95)
POOLS: list[Pool] = [PrefillPool(WORKER, GOALS), DecodePool(WORKER, GOALS), SharedPool(WORKER, GOALS)]


def test_points_have_the_moments() -> None:
    for squared in (1000.0**2, 1.5e6, 4e6):
        points = Lengths(1000, squared, 10).points
        assert len(points) == NUM_POINTS
        assert sum(points) / NUM_POINTS == pytest.approx(1000)
        assert sum(x * x for x in points) / NUM_POINTS == pytest.approx(squared, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Lengths(0, 1, 1), "input_tokens"),
        (lambda: Lengths(10, 1, 1), "input_squared"),
        (lambda: Lengths(10, 100, 0), "output_tokens"),
        (lambda: Lengths(10, 100, 10, output_squared=1), "output_squared"),
        (lambda: Lengths(10, 100, 1, cached_share=1), "cached_share"),
        (lambda: Load(-1, LENGTHS), "rate_per_s"),
        (lambda: Load(1, LENGTHS, burstiness=-1), "burstiness"),
        (lambda: Limits(0, 1, 1), "max_num_batched_tokens"),
        (lambda: Goals(ttft_s=0), "ttft_s"),
        (lambda: Goals(quantile=1.0), "quantile"),
    ],
)
def test_what_is_wrong_is_named(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=f"^{field}: "):
        make()


def test_erlang_c_of_the_textbook() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 0.0) == 0.0


def test_waits_are_exact_for_one_server() -> None:
    """Pollaczek and Khinchine: half of it with service of one length."""
    exponential, fixed = waiting(0.8, 1, 2.0, 1.0), waiting(0.8, 1, 2.0, 0.0)
    assert exponential is not None and fixed is not None
    assert exponential.mean_s == pytest.approx(2.0 * 0.8 / 0.2)
    assert fixed.mean_s == pytest.approx(exponential.mean_s / 2)
    assert exponential.within(3.0) == pytest.approx(1 - 0.8 * math.exp(-0.3))
    assert exponential.within(-1.0) == 0.0
    assert waiting(2.0, 2, 1.0, 1.0) is None


@pytest.mark.parametrize(("num_servers", "utilization"), [(1, 0.7), (4, 0.8), (12, 0.85)])
def test_waits_match_a_simulated_queue(num_servers: int, utilization: float) -> None:
    """Prompts as they are spread, first come first served: the share within a service time is off by a few hundredths at most."""
    rng = random.Random(7)
    times = times_alone(WORKER, LENGTHS)
    rate = utilization * num_servers / times.mean_s
    waits = _simulated_waits(rng, list(times.each), rate, num_servers, 60_000)
    wait = waiting(rate * times.mean_s, num_servers, times.mean_s, times.scv)
    assert wait is not None
    assert sum(waits) / len(waits) == pytest.approx(wait.mean_s, rel=0.25)
    for seconds in (times.mean_s / 2, times.mean_s, 3 * times.mean_s):
        within = sum(waited <= seconds for waited in waits) / len(waits)
        assert within == pytest.approx(wait.within(seconds), abs=0.05)


def _simulated_waits(rng: random.Random, services: list[float], rate: float, num_servers: int, num: int) -> list[float]:
    free, now, waits = [0.0] * num_servers, 0.0, []
    for _ in range(num):
        now += rng.expovariate(rate)
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + rng.choice(services))
        waits.append(start - now)
    return waits[num // 10 :]


def test_concurrency_is_poisson_where_steps_are_of_one_length() -> None:
    """1000 tokens/s in steps of 0.05 s: 50 at once, with a spread of √50."""
    found = concurrency(1000.0, 1, 400, lambda batches: np.full_like(batches, 0.05))
    assert found is not None
    number = found.batches - 1
    mean = float(number @ found.shares)
    assert mean == pytest.approx(50, abs=0.02)
    assert float((number - mean) ** 2 @ found.shares) == pytest.approx(50, rel=0.01)
    assert found.beyond < 1e-12


@pytest.mark.parametrize("outputs", ["fixed", "exponential"])
def test_concurrency_matches_simulated_sharing_whatever_the_outputs(outputs: str) -> None:
    """Two workers' worth of sequences that slow each other down; found as arrivals find them."""
    rng = random.Random(3)
    rate, tokens, num_workers = 8.0, 40.0, 2
    found = concurrency(rate * tokens, num_workers, 1000, lambda batches: 0.01 + 0.002 * batches)
    assert found is not None
    seen = _simulated_sharing(rng, rate, tokens, num_workers, 40_000, is_fixed=outputs == "fixed")
    assert sum(seen) / len(seen) == pytest.approx(float((found.batches * num_workers - 1) @ found.shares), rel=0.12)
    for batch in (5, 10, 15):
        share = sum((number + 1) / num_workers <= batch for number in seen) / len(seen)
        assert share == pytest.approx(found.within(batch), abs=0.06)


def _simulated_sharing(
    rng: random.Random, rate: float, tokens: float, num_workers: int, num: int, *, is_fixed: bool
) -> list[int]:
    """How many each arrival finds. Everybody gets tokens at the same pace, so a heap of when each has its last one is enough."""
    ends: list[float] = []
    seen: list[int] = []
    given, until = 0.0, rng.expovariate(rate)
    while len(seen) < num:
        step = 0.01 + 0.002 * max(1.0, len(ends) / num_workers)
        ends_in = (ends[0] - given) * step if ends else math.inf
        if ends_in <= until:
            given, until = heapq.heappop(ends), until - ends_in
            continue
        given += until / step if ends else 0.0
        seen.append(len(ends))
        heapq.heappush(ends, given + (tokens if is_fixed else rng.expovariate(1 / tokens)))
        until = rng.expovariate(rate)
    return seen[num // 10 :]


def test_the_largest_batch_is_the_last_that_keeps_tpot() -> None:
    batch = prompt_times.largest_batch(WORKER, LENGTHS, GOALS)
    context = LENGTHS.running_context
    assert prompt_times.step_s(MODEL, batch, context) <= 0.03 < prompt_times.step_s(MODEL, batch + 1, context)
    assert prompt_times.decode_tokens_per_s(WORKER, LENGTHS, GOALS) == pytest.approx(
        batch / prompt_times.step_s(MODEL, batch, context)
    )


def test_room_bounds_the_batch() -> None:
    few = replace(WORKER, limits=Limits(2048, 5, 400_000))
    little = replace(WORKER, limits=Limits(2048, 128, 3 * int(LENGTHS.running_context)))
    assert prompt_times.largest_batch(few, LENGTHS, GOALS) == 5
    assert prompt_times.largest_batch(little, LENGTHS, GOALS) == 3
    assert prompt_times.largest_batch(WORKER, LENGTHS, Goals()) == 128


def test_an_objective_that_nobody_can_keep_does_not_ask_for_all_workers() -> None:
    impossible = Goals(ttft_s=0.001, tpot_s=0.001, quantile=0.95)
    assert not prompt_times.keeps_tpot(WORKER, LENGTHS, impossible)
    for kind in (PrefillPool, DecodePool, SharedPool):
        assert fewest(kind(WORKER, impossible), Load(10, LENGTHS), 50) is not None


def test_small_pools_need_relatively_more() -> None:
    """Square-root staffing: ten times the load needs less than ten times the workers, at the same objectives."""
    for pool in POOLS:
        one, ten = fewest(pool, Load(4, LENGTHS), 500), fewest(pool, Load(400, LENGTHS), 500)
        assert one is not None and ten is not None
        assert ten < 100 * one
    busy = [
        SharedPool(WORKER, GOALS).outlook(Load(rate, LENGTHS), fewest(POOLS[2], Load(rate, LENGTHS), 500) or 1)
        for rate in (4, 400)
    ]
    assert busy[0] is not None and busy[1] is not None and busy[0].utilization < busy[1].utilization


def test_bursts_need_more() -> None:
    for pool in POOLS:
        calm, bursty = (bearable(pool, Load(1, LENGTHS, burstiness), 6) for burstiness in (1.0, 5.0))
        assert bursty < calm


def test_cached_prompts_need_less_prefill() -> None:
    cached = replace(LENGTHS, cached_share=0.5)
    assert bearable(POOLS[0], Load(1, cached), 3) > 1.4 * bearable(POOLS[0], Load(1, LENGTHS), 3)


def test_predicted_latencies_are_those_that_the_share_keeps() -> None:
    outlook = POOLS[0].outlook(Load(20, LENGTHS), 3)
    assert outlook is not None and outlook.ttft_s is not None
    again = PrefillPool(WORKER, replace(GOALS, ttft_s=outlook.ttft_s)).outlook(Load(20, LENGTHS), 3)
    assert again is not None and again.attainment == pytest.approx(GOALS.each, abs=0.02)
    decode = POOLS[1].outlook(Load(20, LENGTHS), 3)
    assert decode is not None and decode.tpot_s is not None
    again = DecodePool(WORKER, replace(GOALS, tpot_s=decode.tpot_s)).outlook(Load(20, LENGTHS), 3)
    assert again is not None and again.attainment == pytest.approx(GOALS.each, abs=0.02)


def test_bearable_is_where_it_ceases_to_keep() -> None:
    for pool in POOLS:
        rate = bearable(pool, Load(1, LENGTHS), 4)
        assert keeps(pool, Load(rate * 0.999, LENGTHS), 4) and not keeps(pool, Load(rate * 1.001, LENGTHS), 4)
        assert fewest(pool, Load(rate * 0.999, LENGTHS), 50) == 4


def test_no_load_needs_nobody_and_too_much_nobody_can_bear() -> None:
    for pool in POOLS:
        assert fewest(pool, Load(0, LENGTHS), 5) == 0
        assert fewest(pool, Load(1e4, LENGTHS), 5) is None
        assert bearable(pool, Load(1, LENGTHS), 0) == 0.0
        assert pool.outlook(Load(1e4, LENGTHS), 5) is None


def test_without_objectives_a_pool_keeps_up() -> None:
    for kind in (PrefillPool, DecodePool, SharedPool):
        number = fewest(kind(WORKER, Goals(quantile=0.9)), Load(50, LENGTHS), 100)
        assert number is not None
        outlook = kind(WORKER, Goals(quantile=0.9)).outlook(Load(50, LENGTHS), number)
        assert outlook is not None and outlook.utilization <= 0.95


RATES = st.floats(0.01, 300)
SHAPES = st.builds(
    lambda mean, spread, out, cached: Lengths(mean, mean**2 * spread, out, cached),
    st.floats(20, 4000),
    st.floats(1.0, 3.0),
    st.floats(1, 500),
    st.floats(0, 0.9),
)


@settings(max_examples=60, deadline=None)
@given(kind=st.integers(0, 2), lengths=SHAPES, rates=st.tuples(RATES, RATES), burstiness=st.floats(0.5, 6))
def test_more_load_never_needs_fewer(kind: int, lengths: Lengths, rates: tuple[float, float], burstiness: float) -> None:
    pool, low = POOLS[kind], Load(min(rates), lengths, burstiness)
    few, many = fewest(pool, low, 60), fewest(pool, low.at(max(rates)), 60)
    assert many is None or (few is not None and few <= many)


@settings(max_examples=60, deadline=None)
@given(kind=st.integers(0, 2), lengths=SHAPES, rate=RATES, number=st.integers(1, 40))
def test_one_worker_more_never_keeps_fewer(kind: int, lengths: Lengths, rate: float, number: int) -> None:
    before, after = (POOLS[kind].outlook(Load(rate, lengths), num) for num in (number, number + 1))
    assert before is None or (after is not None and after.attainment >= before.attainment - 1e-6)


@settings(max_examples=40, deadline=None)
@given(kind=st.integers(0, 2), lengths=SHAPES, rate=RATES, factor=st.floats(1.0, 2.0))
def test_slower_workers_never_need_fewer(kind: int, lengths: Lengths, rate: float, factor: float) -> None:
    goals, load = Goals(quantile=0.95), Load(rate, lengths)
    make = (PrefillPool, DecodePool, SharedPool)[kind]
    fast, slow = fewest(make(WORKER, goals), load, 60), fewest(make(WORKER.slower(factor), goals), load, 60)
    assert slow is None or (fast is not None and fast <= slow)
