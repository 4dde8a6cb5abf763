"""The decision to try again, without a network or a clock."""

from __future__ import annotations

import pytest

from pdmesh.client.channel import Preference, addresses
from pdmesh.client.stream import Retrier, RetryPolicy
from pdmesh.errors import Cancelled, DeadlineExceeded, InvalidArgument, MeshError, Overloaded, Unavailable

GONE = Unavailable("gone")


def test_each_address_is_tried_at_once_then_with_doubling_pauses() -> None:
    retrier = Retrier(RetryPolicy(), num_addresses=2, address=0, now=0.0, timeout_s=None)
    attempts = [(retrier.failed(GONE, 0.0), retrier.address) for _ in range(6)]
    assert attempts == [(0.0, 1), (0.05, 0), (0.05, 1), (0.1, 0), (0.1, 1), (0.2, 0)]


def test_backoff_is_bounded_and_forgotten_after_progress() -> None:
    retrier = Retrier(RetryPolicy(resume_timeout_s=1e9), num_addresses=1, address=0, now=0.0, timeout_s=None)
    delays = [retrier.failed(GONE, 0.0) for _ in range(40)]
    assert max(delays) == 2.0
    retrier.progressed(1.0)
    assert retrier.failed(GONE, 1.0) == 0.05


def test_patience_is_counted_from_the_last_sign_of_life() -> None:
    retrier = Retrier(RetryPolicy(resume_timeout_s=10.0), num_addresses=1, address=0, now=0.0, timeout_s=None)
    retrier.progressed(100.0)
    assert retrier.failed(GONE, 109.0) == 0.05
    with pytest.raises(Unavailable):
        retrier.failed(GONE, 111.0)


def test_deadline_wins() -> None:
    retrier = Retrier(RetryPolicy(), num_addresses=1, address=0, now=0.0, timeout_s=5.0)
    assert retrier.time_left(2.0) == 3.0
    assert retrier.time_left(7.0) == 0.0
    with pytest.raises(DeadlineExceeded, match="gone"):
        retrier.failed(GONE, 4.99)


@pytest.mark.parametrize(
    "error", [InvalidArgument("seed", "bad"), Cancelled("stop"), DeadlineExceeded("late"), Overloaded("full")]
)
def test_other_errors_are_final(error: MeshError) -> None:
    retrier = Retrier(RetryPolicy(), num_addresses=2, address=0, now=0.0, timeout_s=None)
    with pytest.raises(type(error)):
        retrier.failed(error, 0.0)


def test_overload_waits_for_the_delay_that_was_named() -> None:
    retrier = Retrier(RetryPolicy(retry_overload=True), num_addresses=1, address=0, now=0.0, timeout_s=100.0)
    assert retrier.failed(Overloaded("full", retry_delay_s=1.5), 60.0) == 1.5
    assert Retrier(RetryPolicy(), 1, 0, 0.0, None).failed(Overloaded("full", retry_delay_s=0.2), 1.0, resuming=True) == 0.2


def test_addresses() -> None:
    assert addresses(" a:1, b:2 ,") == ("a:1", "b:2")
    assert addresses(["a:1"]) == ("a:1",)
    assert addresses("[::1]:8100,dns:///[::1]:8100,ipv6:[::1]:8100") == ("[::1]:8100", "dns:///[::1]:8100", "ipv6:[::1]:8100")
    with pytest.raises(ValueError, match="at least one"):
        addresses(" , ")
    with pytest.raises(ValueError, match=r"routers: an IPv6 host stands in brackets, as in \[::1\]:8100, got '::1:8100'"):
        addresses("a:1,::1:8100")


def test_a_router_that_was_lost_is_not_tried_first_by_other_calls() -> None:
    preference = Preference()
    preference.lost(0, 1)
    assert preference.address == 1
    preference.lost(0, 1)  # another call of the same connection says so later
    assert preference.address == 1
    preference.address = 0  # it has answered again
    preference.lost(1, 0)
    assert preference.address == 0
