"""The curve between its points, beyond them, and corrected by steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.cost_curve import OUTLIER, CostCurve

CURVE = CostCurve((1, 2, 4, 8), (1.0, 1.2, 1.4, 2.0))


@pytest.mark.parametrize(("rows", "expected"), [(1, 1.0), (2, 1.2), (3, 1.3), (6, 1.7), (8, 2.0), (16, 4.0)])
def test_between_points_and_beyond(rows: int, expected: float) -> None:
    assert CURVE.step_s(rows) == pytest.approx(expected)


def test_it_comes_to_what_steps_take() -> None:
    curve = CURVE
    for _ in range(400):
        for rows in (1, 2, 4, 8):
            curve = curve.saw(rows, 0.5, 0.5 + 1.5 * CURVE.step_s(rows) + (0.2 if rows == 4 else 0))
    assert curve.seconds == pytest.approx((1.5, 1.8, 2.3, 3.0), rel=0.02)


def test_between_two_points_both_move() -> None:
    curve = CURVE
    for _ in range(2000):
        curve = curve.saw(3, 0.0, 1.5)
    assert curve.step_s(3) == pytest.approx(1.5, rel=0.01)


def test_a_faster_machine_bends_nothing() -> None:
    """Only steps without drafts are seen: those with some do not become dearer by that."""
    curve = CURVE
    for _ in range(1000):
        curve = curve.saw(1, 0.0, 0.7)
    assert curve.step_s(1) == pytest.approx(0.7, rel=0.01)
    assert curve.step_s(8) / curve.step_s(1) == pytest.approx(2.0, rel=0.2)


def test_a_measurement_that_was_held_up_is_taken_back() -> None:
    slow = CostCurve(CURVE.rows, tuple(30 * seconds for seconds in CURVE.seconds))
    assert slow.saw(2, 0.0, 1.2).seconds == pytest.approx(CURVE.seconds)


def test_a_stalled_machine_teaches_nothing() -> None:
    assert CURVE.saw(4, 0.0, 1.4 * OUTLIER * 1.01) == CURVE
    assert CURVE.saw(4, 5.0, 1.4) == CURVE
    assert CURVE.saw(9, 0.0, 2.2) == CURVE


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.0, 5.0)), max_size=60))
def test_more_rows_never_take_less(steps: list[tuple[int, float]]) -> None:
    curve = CURVE
    for rows, seconds in steps:
        curve = curve.saw(rows, 0.0, seconds)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.seconds[0] > 0
