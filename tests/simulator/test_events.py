"""The queue of events: by time, then in the order in which they were put."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.simulator.events import EventQueue


@given(st.lists(st.integers(0, 5)))
def test_in_order(times: list[int]) -> None:
    events, seen = EventQueue(), list[tuple[int, int]]()
    for number, at_s in enumerate(times):
        events.at(at_s, lambda *what: seen.append(what), at_s, number)
    events.run()
    assert seen == sorted((at_s, number) for number, at_s in enumerate(times))
    assert events.num_done == len(times)


def test_actions_put_actions_and_the_clock_follows() -> None:
    events, seen = EventQueue(), list[float]()

    def tick() -> None:
        seen.append(events.now)
        if len(seen) < 4:
            events.after(0.5, tick)

    events.after(1.0, tick)
    events.run()
    assert seen == [1.0, 1.5, 2.0, 2.5]


def test_stops_where_it_is_told_to() -> None:
    events, seen = EventQueue(), list[int]()
    for number in range(5):
        events.at(number, seen.append, number)
    events.run(until_s=1.5)
    assert (seen, events.now) == ([0, 1], 1.5)
    events.at(2, events.stop)
    events.run()
    assert (seen, events.now, len(events)) == ([0, 1, 2], 2.0, 2)


@pytest.mark.parametrize("at_s", [0.5, float("nan")])
def test_nothing_happens_in_the_past(at_s: float) -> None:
    events = EventQueue()
    events.at(1.0, lambda: None)
    events.run()
    with pytest.raises(ValueError, match="at_s"):
        events.at(at_s, lambda: None)
