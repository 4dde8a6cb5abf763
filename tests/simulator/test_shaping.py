"""Shapes of load: order and clumping stay, rates become what was asked for, and nothing is held in memory."""

import math
from itertools import count, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.simulator import arrivals as simulator_arrivals
from pdmesh.simulator.arrivals import Arrival

STEADY = [Arrival(number / 10, 100, 10) for number in range(20_000)]


def times(arrivals: list[Arrival]) -> list[float]:
    return [arrival.at_s for arrival in arrivals]


@given(st.lists(st.floats(0, 1e5), max_size=30), st.floats(1.0, 1e5), st.floats(0, 0.99))
def test_a_swing_keeps_the_order_and_inverts_its_count(at: list[float], period_s: float, depth: float) -> None:
    warp, wave = simulator_arrivals.swing(period_s, depth), 2 * math.pi / period_s
    warped = [warp(at_s) for at_s in sorted(at)]
    assert all(early <= late + 1e-9 for early, late in pairwise(warped))
    for before, after in zip(sorted(at), warped, strict=True):
        assert after + depth / wave * (1 - math.cos(wave * after)) == pytest.approx(before, rel=1e-9, abs=1e-9)


def test_a_swing_has_its_highest_rate_in_the_first_quarter() -> None:
    day = times(list(simulator_arrivals.warped(STEADY, simulator_arrivals.swing(1000.0, 0.5))))
    num_high = sum(200 <= at_s < 300 for at_s in day)
    num_low = sum(700 <= at_s < 800 for at_s in day)
    assert num_high == pytest.approx(1000 * (1 + 0.5 * 0.9836), rel=0.01)
    assert num_low == pytest.approx(1000 * (1 - 0.5 * 0.9836), rel=0.01)
    assert sum(at_s < 1000 for at_s in day) == pytest.approx(10_000, rel=1e-3)


def test_a_burst_is_a_minute_of_more() -> None:
    bursting = times(list(simulator_arrivals.warped(STEADY, simulator_arrivals.burst(100.0, 3.0))))
    per_minute = [sum(start <= at_s < start + 60 for at_s in bursting) for start in (40, 100, 160)]
    assert per_minute == [600, pytest.approx(1800, abs=2), pytest.approx(600, abs=2)]
    assert bursting == sorted(bursting)


def test_rates_multiply() -> None:
    faster = list(simulator_arrivals.at_rate(STEADY, 4.0))
    assert simulator_arrivals.mean_rate(faster) == pytest.approx(4 * simulator_arrivals.mean_rate(STEADY))
    assert simulator_arrivals.mean_rate(STEADY[:1]) == 0.0


def test_repeated_goes_on_where_it_ended() -> None:
    some = [Arrival(0.0, 600, 1, (0,)), Arrival(1.0, 600, 1, (0,)), Arrival(3.0, 600, 1, (5,))]
    many = list(simulator_arrivals.repeated(lambda: some, 8))
    assert times(many) == [0.0, 1.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0]
    assert [arrival.hashes for arrival in many] == [(0,), (0,), (5,), (6,), (6,), (11,), (12,), (12,)]
    assert list(simulator_arrivals.repeated(list, 5)) == []


@given(st.integers(1, 5000), st.integers(1, 5000), st.floats(0.1, 3.0), st.integers(2, 4000))
def test_lengths_fit(num_input: int, num_output: int, factor: float, max_context: int) -> None:
    hashes = tuple(range(num_input // 512))
    arrival = Arrival(0.0, num_input, num_output, hashes)
    [scaled] = simulator_arrivals.lengths([arrival], inputs=factor, outputs=factor, max_context=max_context)
    assert 1 <= scaled.num_input < max_context
    assert 1 <= scaled.num_output <= max_context - scaled.num_input
    assert scaled.hashes == hashes[: len(scaled.hashes)]
    assert len(scaled.hashes) * 512 <= max(scaled.num_input, num_input)
    assert scaled.num_input >= num_input or len(scaled.hashes) * 512 <= scaled.num_input


def test_all_of_it_is_lazy() -> None:
    endless = (Arrival(float(number), 10, 10) for number in count())
    shaped = simulator_arrivals.warped(
        simulator_arrivals.lengths(simulator_arrivals.at_rate(endless, 2.0), inputs=2.0), simulator_arrivals.burst(5.0, 2.0)
    )
    assert len(list(islice(shaped, 1000))) == 1000
