"""Retry delays follow how fast places come free while somebody needs one."""

import pytest

from router.flow_control.capacity import BusyClock, DrainRate
from router.flow_control.slo_admission import MAX_RETRY_DELAY_S, MIN_RETRY_DELAY_S, retry_delay_s


@pytest.mark.parametrize(
    ("releases", "num_ahead", "now", "delay"),
    [
        ([], 5, 10.0, 1.0),  # nothing is known
        ([1.0], 5, 10.0, 1.0),
        ([0.0, 1.0, 2.0, 3.0], 1, 4.0, 2.0),  # one a second, two to go
        ([0.0, 0.001], 0, 0.002, MIN_RETRY_DELAY_S),
        ([0.0, 1.0], 0, 1000.0, MAX_RETRY_DELAY_S),  # it stands still
    ],
)
def test_retry_delay_follows_the_drain_rate(releases: list[float], num_ahead: int, now: float, delay: float) -> None:
    rate = DrainRate()
    for at in releases:
        rate.record(at)
    assert retry_delay_s(rate.seconds_for(num_ahead, now)) == pytest.approx(delay)


def test_larger_releases_drain_more() -> None:
    rate = DrainRate()
    for at in range(100):
        rate.record(float(at), 50.0)
    assert rate.seconds_for(100.0, 100.0) == pytest.approx(3.0)  # 50 a second; one release beyond the 100


def test_the_clock_stands_still_while_nobody_needs_a_place() -> None:
    clock = BusyClock()
    assert clock.advance(10.0, busy=True) == 0.0
    assert clock.advance(12.0, busy=False) == 2.0
    assert clock.advance(100.0, busy=True) == 2.0
    assert clock.advance(101.0, busy=True) == 3.0
