"""Statistics in bounded memory: quantiles within their stated error, every request in one window."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.results import MAX_WINDOWS, RELATIVE_ERROR, Histogram, Results, meets


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_quantiles_are_within_their_error(values: list[float], q: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert abs(histogram.quantile(q) - exact) <= exact * (RELATIVE_ERROR + 1e-9)
    assert histogram.mean_s == pytest.approx(sum(values) / len(values))
    assert histogram.max_s == max(values)


def test_no_values_and_absurd_ones() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) == histogram.mean_s == 0.0
    histogram.add(0.0)
    histogram.add(1e9)
    assert histogram.num_values == 2


def request(number: int, at_s: float, first_at: float | None = None, last_at: float | None = None) -> Request:
    made = Request(number, Arrival(at_s, 100, 11), 100, 11, ttft_goal_s=0.5, tpot_goal_s=0.1)
    made.first_at, made.last_at = first_at, last_at
    return made


@pytest.mark.parametrize(("first_at", "last_at", "met"), [(0.5, 1.5, True), (0.6, 1.5, False), (0.4, 1.5, False)])
def test_both_objectives_count(first_at: float, last_at: float, met: bool) -> None:
    assert meets(request(0, 0.0, first_at, last_at)) is met


def test_windows_hold_everything_once() -> None:
    results = Results(window_s=10.0)
    late = request(1, 25.0, 25.2, 25.9)
    for one in (request(0, 5.0), late):
        results.arrived(one)
    refused = request(2, 29.0)
    refused.reason = "share"
    results.arrived(refused)
    results.ended(late, End.COMPLETED, 26.0)
    results.ended(refused, End.REFUSED, 29.0)
    assert [window.num_arrived for window in results.windows] == [1, 0, 2]
    assert results.windows[2].attainment == 0.5
    assert results.reasons == {"share": 1}
    assert results.goodput == pytest.approx(1 / 29.0)


def test_long_runs_have_longer_windows() -> None:
    results = Results(window_s=1.0)
    for number in range(3 * MAX_WINDOWS):
        results.arrived(request(number, float(number)))
    assert results.window_s == 4.0
    assert len(results.windows) <= MAX_WINDOWS
    assert {window.num_arrived for window in results.windows} == {4}
