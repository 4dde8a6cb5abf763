"""How long a tier is waited for, and what is learned of its speed."""

from __future__ import annotations

import pytest

from kvtransfer.tiers.rate import FORGOTTEN_S, LEAST_LIMIT_S, LEFT_OUT_S, MOST_LEFT_OUT_S, ReadRate, ToldTime, is_worth, limit_s

MB = 1 << 20


@pytest.mark.parametrize(
    ("restore_s", "saved_s", "worth", "limit"),
    [
        (0.010, 0.100, True, LEAST_LIMIT_S),
        (0.100, 1.000, True, 0.5),  # half of the computation
        (0.200, 1.000, True, 0.8),  # four times what it should take
        (0.700, 1.000, True, 1.0),  # but no longer than the computation
        (0.090, 0.100, False, LEAST_LIMIT_S),
    ],
)
def test_a_tier_is_waited_for_while_that_may_pay(restore_s: float, saved_s: float, worth: bool, limit: float) -> None:
    assert is_worth(restore_s, saved_s) is worth
    assert limit_s(restore_s, saved_s) == pytest.approx(limit)


def test_a_rate_is_learned_and_forgotten() -> None:
    rate = ReadRate(1e9)
    for _ in range(30):
        rate.came(100 * MB, 1.0, 0.0)
    assert rate.bytes_per_s(0.0) == pytest.approx(100 * MB, rel=0.01)
    assert rate.bytes_per_s(20 * FORGOTTEN_S) == pytest.approx(1e9)
    rate.came(MB // 2, 100.0, 20 * FORGOTTEN_S)  # too small to say anything
    assert rate.bytes_per_s(20 * FORGOTTEN_S) == pytest.approx(1e9)


def test_a_tier_that_is_late_is_left_out_longer_each_time() -> None:
    rate, seen = ReadRate(1e9), []
    for _ in range(6):
        rate.was_late(MB, 1.0, 0.0)
        seen.append(rate.not_before)
    assert seen == [LEFT_OUT_S, 2 * LEFT_OUT_S, 4 * LEFT_OUT_S, 8 * LEFT_OUT_S, MOST_LEFT_OUT_S, MOST_LEFT_OUT_S]
    rate.came(MB, 0.1, 0.0)
    rate.was_late(MB, 1.0, 0.0)
    assert rate.not_before == LEFT_OUT_S


def test_a_time_is_told_anew_when_it_has_changed_by_more_than_a_quarter() -> None:
    time = ToldTime()
    measured = (1.0, 1.2, 0.85, 1.26, 1.3, 1.0, 0.0, 0.0, 0.5)
    assert [time.told(seconds) for seconds in measured] == [1.0, 1.0, 1.0, 1.26, 1.26, 1.0, 0.0, 0.0, 0.5]
