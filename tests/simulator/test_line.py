"""The line for room: who is first tries first, and a moment's shortage does not last."""

from __future__ import annotations

from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.request import Request
from pdmesh.simulator.routers.admission import SimulatedQueue

ANSWER_S = 0.05
"""Until a worker answers, between two of its steps."""


def requests(num: int) -> list[Request]:
    return [Request(number, Arrival(0.0, 10, 10), 10, 10, None, None) for number in range(num)]


def test_a_line_that_finds_room_is_gone_in_a_few_answers() -> None:
    events = EventQueue()
    placed: list[tuple[float, int]] = []

    def attempt(request: Request) -> None:
        events.after(ANSWER_S, answer, request)

    def answer(request: Request) -> None:
        placed.append((events.now, request.number))
        line.left(request)

    line = SimulatedQueue(events, attempt)
    for request in requests(100):
        line.join(request)
    events.run(10.0)
    assert [number for _, number in placed] == list(range(100))
    took_s = placed[-1][0] - placed[0][0]
    assert took_s < 10 * ANSWER_S  # 1, 2, 4, ... of them at once; one by one they would take a hundred


def test_without_room_only_the_first_asks() -> None:
    events = EventQueue()
    asked: list[int] = []

    def attempt(request: Request) -> None:
        asked.append(request.number)
        events.after(ANSWER_S, line.failed, request)

    line = SimulatedQueue(events, attempt)
    for request in requests(10):
        line.join(request)
    events.run(5.0)
    assert set(asked) == {0} and len(asked) > 5


def test_after_a_failure_those_behind_wait_again() -> None:
    events = EventQueue()
    room = 7
    asked: list[int] = []

    def attempt(request: Request) -> None:
        asked.append(request.number)
        events.after(ANSWER_S, answer, request)

    def answer(request: Request) -> None:
        nonlocal room
        if room:
            room -= 1
            line.left(request)
        else:
            line.failed(request)

    line = SimulatedQueue(events, attempt)
    for request in requests(30):
        line.join(request)
    events.run(5.0)
    assert len(line) == 23
    assert set(asked[-5:]) == {7}
