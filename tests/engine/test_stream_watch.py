"""Points of a stream that stands still until a test moves it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from pdmesh.engine.kv_cache.streams import StreamWatch


class Stream:
    """Its points are passed in order."""

    def __init__(self) -> None:
        self.watch = StreamWatch()
        self.asked: list[int] = []
        self._passed, self._changed = 0, threading.Condition()

    def move_to(self, position: int) -> None:
        with self._changed:
            self._passed = position
            self._changed.notify_all()

    def until_asked(self, *positions: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.asked == list(positions), 10), self.asked

    def _wait(self, position: int) -> None:
        with self._changed:
            self.asked.append(position)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._passed >= position, 10)


@pytest.fixture
def stream() -> Iterator[Stream]:
    found = Stream()
    yield found
    found.move_to(1000)
    found.watch.close()


def test_the_earliest_point_is_waited_for_first(stream: Stream) -> None:
    first = stream.watch.tell(3, lambda: stream._wait(3))
    stream.until_asked(3)
    futures = {at: stream.watch.tell(at, partial(stream._wait, at)) for at in (12, 4, 7)}
    for at in (4, 7, 12):
        stream.move_to(at)
        futures[at].result(10)
        assert [other for other, future in futures.items() if future.done() and other > at] == []
    first.result(10)
    assert stream.asked == [3, 4, 7, 12]


def test_a_question_that_is_taken_back_is_not_waited_for(stream: Stream) -> None:
    first = stream.watch.tell(1, lambda: stream._wait(1))
    stream.until_asked(1)
    second, third = (stream.watch.tell(at, partial(stream._wait, at)) for at in (2, 3))
    assert second.cancel()
    stream.move_to(3)
    first.result(10)
    third.result(10)
    assert stream.asked == [1, 3]


def test_what_goes_wrong_is_told_to_who_asked(stream: Stream) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        stream.watch.tell(1, fail).result(10)
    stream.move_to(2)
    stream.watch.tell(2, lambda: stream._wait(2)).result(10)


def test_the_end_comes_behind_all_questions(stream: Stream) -> None:
    last = stream.watch.tell(5, lambda: stream._wait(5))
    stream.move_to(5)
    stream.watch.close()
    assert last.done()
    stream.watch.close()
    again = stream.watch.tell(5, lambda: stream._wait(5))
    again.result(10)
