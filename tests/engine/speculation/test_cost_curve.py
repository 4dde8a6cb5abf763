"""The curve between its points, beyond them, and corrected by steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.speculation.cost_curve import LONG_PATIENCE, OUTLIER, PATIENCE, STALE_AFTER, CostCurve, rising

CURVE = CostCurve((1, 2, 4, 8), (1.0, 1.2, 1.4, 2.0))


@pytest.mark.parametrize(("rows", "expected"), [(1, 1.0), (2, 1.2), (3, 1.3), (6, 1.7), (8, 2.0), (16, 3.2)])
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


def saw(curve: CostCurve, *steps: tuple[int, float]) -> CostCurve:
    for rows, seconds in steps:
        curve = curve.saw(rows, 0.0, seconds)
    return curve


def test_a_stall_teaches_nothing() -> None:
    stalled = (4, 1.4 * OUTLIER * 1.01)
    assert saw(CURVE, stalled).seconds == CURVE.seconds
    assert saw(CURVE, *[stalled, (4, 1.4)] * 10).seconds == CURVE.seconds, "not one after the other"


def test_a_slower_machine_is_believed_in_the_end() -> None:
    assert saw(CURVE, *[(1, 3.0)] * (LONG_PATIENCE - 1)).seconds == CURVE.seconds
    assert saw(CURVE, *[(1, 3.0)] * LONG_PATIENCE).seconds == pytest.approx([3 * seconds for seconds in CURVE.seconds])


def test_what_holds_the_machine_up_for_some_steps_bends_nothing() -> None:
    """Another kind of step took the expected time before, not meanwhile."""
    held_up = [(1, seconds) for seconds in (12.0, 200.0, 83.0, 18.0)]
    assert saw(CURVE, (8, 2.0), *held_up).seconds == CURVE.seconds


def test_what_another_kind_took_before_the_machine_was_slower_bends_nothing() -> None:
    slower = saw(CURVE, (8, 2.0), *[(1, 3.0)] * LONG_PATIENCE)
    assert slower.seconds == pytest.approx([3 * seconds for seconds in CURVE.seconds])


def test_a_point_far_too_dear_is_corrected_alone() -> None:
    """The step before it took what it should."""
    dear = CostCurve(CURVE.rows, (*CURVE.seconds[:-1], 60.0))
    assert saw(dear, (1, 1.0), (8, 2.0)).seconds == pytest.approx(CURVE.seconds)


def test_of_late_steps_the_least_late_counts() -> None:
    late = [(1, 3.0)] * (LONG_PATIENCE - 1)
    assert saw(CURVE, *late, (1, 300.0)).seconds == pytest.approx([3 * seconds for seconds in CURVE.seconds])


def test_the_first_steps_set_the_height() -> None:
    """It was measured when the machine was faster, perhaps, and has its shape from then."""
    curve = saw(CURVE, *[(1, 1.7)] * 10)
    assert curve.step_s(1) == pytest.approx(1.7, rel=0.12)
    assert curve.step_s(8) / curve.step_s(1) == pytest.approx(2.0, rel=0.1)


def test_a_point_measured_too_cheap_is_corrected_alone() -> None:
    """Steps of another size take what they should meanwhile."""
    assert saw(CURVE, *[(8, 6.0), (1, 1.0)] * PATIENCE).seconds == pytest.approx((1.0, 1.2, 1.4, 6.0))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("wrong", [1 / 30, 1 / 3, 3, 30])
def test_one_wrong_point_does_not_stay(rows: int, wrong: float) -> None:
    """In a few steps, all sizes in turn."""
    at = CURVE.rows.index(rows)
    seconds = [wrong * point_s if point == at else point_s for point, point_s in enumerate(CURVE.seconds)]
    curve = replace(CURVE, seconds=rising(seconds, at))
    for _ in range(40):
        curve = saw(curve, *zip(CURVE.rows, CURVE.seconds, strict=True))
    assert curve.seconds == pytest.approx(CURVE.seconds, rel=0.3)


def test_what_was_not_seen_for_long_is_learned_at_once() -> None:
    curve = saw(CURVE, *[(1, 1.0)] * (STALE_AFTER + 1), (8, 3.0))
    assert curve.step_s(8) == pytest.approx(2.5)
    assert curve.step_s(1) == pytest.approx(1.0)


def test_steps_beyond_the_last_point_make_one() -> None:
    curve = CURVE
    for _ in range(400):
        curve = saw(curve, (16, 5.0), (8, 2.0), (9, 2.4))
    assert curve.rows == (1, 2, 4, 8, 16)
    assert curve.step_s(16) == pytest.approx(5.0, rel=0.02)
    assert curve.step_s(8) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("wrong", [0.2, 1 / 3, 3, 50])
def test_attention_is_learned_from_long_contexts(wrong: float) -> None:
    """Steps with short contexts between them say what is not attention."""
    context_s = 1e-4
    curve = replace(CURVE, context_s=wrong * context_s, row_context_s=wrong * context_s / 10)
    for _ in range(600):
        for context in (100, 30_000):
            curve = curve.saw(1, curve.context_s * context, 1.0 + context_s * context)
    assert curve.context_s == pytest.approx(context_s, rel=0.1)
    assert curve.context_s == pytest.approx(10 * curve.row_context_s)
    assert curve.step_s(1) == pytest.approx(1.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.0, 5.0)), max_size=60))
def test_more_rows_never_take_less(steps: list[tuple[int, float]]) -> None:
    curve = CURVE
    for rows, seconds in steps:
        curve = curve.saw(rows, 0.0, seconds)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.seconds[0] > 0
