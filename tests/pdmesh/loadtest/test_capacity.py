"""The search finds the rate of a system that has one, whatever it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.loadtest.measure import Search, Trial, found


def search_all(search: Search, capacity: float) -> list[Trial]:
    """All windows against a system that keeps everything up to `capacity` and nothing above."""
    trials: list[Trial] = []
    while (rate := search.next_rate(trials)) is not None:
        assert len(trials) < 200
        trials.append(Trial(rate, 1.0 if rate <= capacity else 0.0, min(rate, capacity)))
    return trials


@given(st.floats(0.02, 5000), st.floats(0.05, 500), st.integers(1, 5), st.floats(0.01, 0.3))
def test_it_ends_within_its_tolerance(capacity: float, first_rate: float, windows: int, tolerance: float) -> None:
    search = Search(first_rate=first_rate, tolerance=tolerance, windows=windows)
    answer = found(search, search_all(search, capacity))
    assert answer.rate is not None and answer.failed_rate is not None
    assert answer.rate <= capacity < answer.failed_rate <= answer.rate * (1 + tolerance)


def test_most_windows_decide_and_no_more_are_run_than_needed() -> None:
    search = Search(windows=3)
    assert search.next_rate([Trial(1, 1.0, 1)]) == 1
    assert search.holds(1, [Trial(1, 1.0, 1), Trial(1, 0.0, 0)]) is None
    assert search.holds(1, [Trial(1, 1.0, 1), Trial(1, 0.0, 0), Trial(1, 0.95, 1)]) is True
    assert search.next_rate([Trial(1, 1.0, 1), Trial(1, 1.0, 1)]) == 2


def test_nothing_holds_and_everything_holds() -> None:
    low = Search(min_rate=0.1)
    assert found(low, search_all(low, 0.0)).rate is None
    high = Search(max_rate=10, first_rate=3)
    answer = found(high, search_all(high, 1e9))
    assert answer.rate == 10 and answer.failed_rate is None


def test_a_rate_that_held_above_one_that_failed_does_not_count() -> None:
    search = Search(windows=1)
    assert search.bounds([Trial(1, 1.0, 1), Trial(2, 0.0, 0), Trial(4, 1.0, 4)]) == (1, 2)


def test_a_second_share_learns_from_the_first_ones_trials() -> None:
    trials = [Trial(1, 1.0, 1), Trial(2, 0.95, 1.9), Trial(1.5, 0.97, 1.45)]
    assert Search(0.9, windows=1).bounds(trials) == (2, None)
    assert Search(0.99, windows=1).bounds(trials) == (1, 1.5)
