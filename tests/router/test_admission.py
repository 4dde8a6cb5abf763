"""Admission: bounds, order, retry delays, and that a place is given back exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission import MAX_RETRY_DELAY_S, MIN_RETRY_DELAY_S, Admission, DrainRate, Refusal, Ticket, TicketState


def _ask(admission: Admission, priority: int = 2, now: float = 0.0) -> Ticket:
    ticket = admission.ask(priority, now)
    assert isinstance(ticket, Ticket)
    return ticket


def test_places_then_queue_then_refusal() -> None:
    admission = Admission(max_inflight=2, max_queued=1)
    assert [_ask(admission).state for _ in range(3)] == [TicketState.ADMITTED, TicketState.ADMITTED, TicketState.WAITING]
    refusal = admission.ask(1, 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.retry_delay_s > 0
    assert "max_inflight 2" in refusal.reason and "max_queued 1" in refusal.reason


def test_priority_goes_first_then_arrival() -> None:
    admission = Admission(max_inflight=1, max_queued=4)
    holder = _ask(admission)
    waiting = [_ask(admission, priority) for priority in (3, 2, 2, 1)]
    order = []
    for _ in waiting:
        (holder,) = admission.release(holder, 0.0)
        order.append(waiting.index(holder))
    assert order == [3, 1, 2, 0]


def test_release_is_idempotent() -> None:
    admission = Admission(max_inflight=1, max_queued=2)
    first, second, third = (_ask(admission) for _ in range(3))
    assert admission.release(first, 0.0) == [second]
    assert admission.release(first, 0.0) == []
    assert admission.release(third, 0.0) == []
    assert (admission.num_inflight, admission.num_queued) == (1, 0)
    assert admission.release(second, 0.0) == []
    assert admission.num_inflight == 0


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "release"]), st.integers(0, 40), st.integers(1, 3))),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_bounds_hold_and_nobody_waits_beside_a_free_place(steps: list[tuple[str, int, int]], places: int, turns: int) -> None:
    admission = Admission(places, turns)
    tickets: list[Ticket] = []
    for what, number, priority in steps:
        if what == "ask":
            answer = admission.ask(priority, 0.0)
            if isinstance(answer, Ticket):
                tickets.append(answer)
        elif tickets:
            admission.release(tickets[number % len(tickets)], 0.0)
        states = [ticket.state for ticket in tickets]
        assert admission.num_inflight == states.count(TicketState.ADMITTED) <= places
        assert admission.num_queued == states.count(TicketState.WAITING) <= turns
        assert admission.num_queued == 0 or admission.num_inflight == places
    for ticket in tickets:
        admission.release(ticket, 0.0)
    assert (admission.num_inflight, admission.num_queued) == (0, 0)


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
    assert rate.delay_until(num_ahead, now) == pytest.approx(delay)
