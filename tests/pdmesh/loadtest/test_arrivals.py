"""Arrival processes: in order, with the rates and the burstiness that were asked for."""

from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.loadtest import arrivals

RATES = st.floats(0.01, 10_000)


@given(RATES, st.floats(0.1, 20), st.integers(0, 2**32))
def test_times_never_go_back(rate: float, burstiness: float, seed: int) -> None:
    rng = random.Random(seed)
    for process in (arrivals.constant(rate), arrivals.poisson(rate, rng), arrivals.gamma(rate, burstiness, rng)):
        times = list(islice(process, 50))
        assert times == sorted(times) and times[0] >= 0


def test_constant_adds_up_no_error() -> None:
    assert next(islice(arrivals.constant(3), 3_000_000, None)) == 1_000_000.0


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_gamma_has_its_rate_and_its_variation(burstiness: float, variation: float) -> None:
    gaps = [b - a for a, b in pairwise(islice(arrivals.gamma(50, burstiness, random.Random(1)), 40_000))]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)


def test_poisson_is_gamma_of_burstiness_one() -> None:
    gaps = [b - a for a, b in pairwise(islice(arrivals.poisson(50, random.Random(1)), 40_000))]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1, rel=0.05)


@given(st.floats(0.1, 50), st.floats(0.1, 50), st.floats(1, 60), st.integers(0, 2**32))
def test_a_ramp_stays_within_its_time(first: float, last: float, duration_s: float, seed: int) -> None:
    times = list(arrivals.ramp(first, last, duration_s, random.Random(seed)))
    assert times == sorted(times)
    assert all(0 <= at_s <= duration_s * (1 + 1e-9) for at_s in times)


def test_a_ramp_has_the_rates_of_its_line() -> None:
    times = list(arrivals.ramp(100, 300, 100, random.Random(1)))
    assert len(times) == pytest.approx(20_000, rel=0.03)
    # The first half of the time has (100 + 200) / 2 a second, the second (200 + 300) / 2.
    assert sum(at_s < 50 for at_s in times) == pytest.approx(7_500, rel=0.04)


def test_a_replay_starts_at_once_and_runs_at_its_speed() -> None:
    assert list(arrivals.replay([10.0, 11.0, 15.0], 2.0)) == [0.0, 0.5, 2.5]
