"""When a worker that says nothing is suspected and lost: its own pauses, and those of the router, are taken into account."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.v1 import decode_pb2
from router.fleet.circuit_breaker import CircuitBreaker, HealthLimits, Role, State
from router.fleet.decode_stream import StreamSettings
from router.fleet.heartbeat import SilenceDetector, SilenceLimits, Watchdog
from router.fleet.incarnation import Incarnation
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.router.test_fleet import running_fleet
from tests.support.waiting import eventually

TICK_S = 0.1
LIMITS = SilenceLimits(least_s=1.0, most_s=3.0, factor=2.5, memory_s=15.0)


class Watched:
    """A worker whose messages come when a test says so, watched on a clock of its own."""

    def __init__(self) -> None:
        self.detector = SilenceDetector(LIMITS, TICK_S)
        self.now = 0.0
        self.detector.tick(0.0)

    def quiet(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.detector.tick(self.now)

    def speak(self, *, every_s: float, for_s: float) -> None:
        for _ in range(round(for_s / every_s)):
            self.quiet(every_s)
            assert not self.detector.is_lost
            self.detector.heard()

    def until_lost(self) -> float:
        began = self.now
        while not self.detector.is_lost:
            self.quiet(TICK_S)
        return self.now - began


def test_one_that_answers_in_time_is_suspected_after_half_a_second_and_lost_after_one() -> None:
    worker = Watched()
    worker.speak(every_s=0.1, for_s=5.0)
    worker.quiet(0.4)
    assert not worker.detector.is_suspect
    worker.quiet(0.2)
    assert worker.detector.is_suspect
    assert not worker.detector.is_lost
    worker.quiet(0.5)
    assert worker.detector.is_lost
    worker.detector.heard()
    assert not worker.detector.is_suspect


def test_a_slow_one_is_given_more_time_and_never_more_than_the_most() -> None:
    slow, slowest = Watched(), Watched()
    slow.speak(every_s=0.8, for_s=20.0)
    assert slow.until_lost() == pytest.approx(2.0, abs=2 * TICK_S)
    slowest.speak(every_s=0.8, for_s=10.0)
    slowest.speak(every_s=1.9, for_s=19.0)
    assert slowest.until_lost() == pytest.approx(3.0, abs=2 * TICK_S)


def test_pauses_are_forgotten() -> None:
    worker = Watched()
    worker.speak(every_s=0.8, for_s=8.0)
    worker.speak(every_s=0.1, for_s=2 * LIMITS.memory_s + 1)
    assert worker.detector.limit_s == LIMITS.least_s


def test_one_that_stood_still_is_not_taken_for_a_slow_one_and_one_that_was_a_little_late_is() -> None:
    stopped, late = Watched(), Watched()
    for worker, pause_s in ((stopped, 10.0), (late, 1.3)):
        worker.speak(every_s=0.1, for_s=5.0)
        worker.quiet(pause_s)
        assert worker.detector.is_lost
        worker.detector.heard()
        worker.speak(every_s=0.1, for_s=1.0)
    assert stopped.until_lost() == pytest.approx(1.0, abs=2 * TICK_S)
    assert late.until_lost() == pytest.approx(3.0, abs=2 * TICK_S)


def test_a_router_that_was_stopped_itself_loses_no_worker() -> None:
    worker = Watched()
    worker.speak(every_s=0.1, for_s=5.0)
    worker.detector.tick(worker.now + 60.0)
    assert not worker.detector.is_suspect


@given(st.lists(st.floats(0.0, 20.0), max_size=60))
def test_the_limit_keeps_its_bounds(pauses: list[float]) -> None:
    worker = Watched()
    for pause_s in pauses:
        worker.quiet(pause_s)
        assert LIMITS.least_s <= worker.detector.limit_s <= LIMITS.most_s
        worker.detector.heard()
        assert not worker.detector.is_lost


class Follower:
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def on_output(self, output: decode_pb2.SequenceOutput) -> None:
        """Nothing comes."""

    def on_event(self, event: decode_pb2.RequestEvent) -> None:
        """Nothing comes."""

    def on_lost(self, reason: str) -> None:
        assert "no sign of life" in reason
        self.lost.set()

    def next_indexes(self) -> list[tuple[int, int]]:
        return [(0, 0)]


PATIENT = StreamSettings("r", heartbeat_ms=50, stream_timeout_s=0.5, grace_s=3600.0)
"""Whose broken streams may take an hour to come back: what is lost earlier is lost by silence."""


async def test_a_worker_silent_on_all_streams_loses_all_of_its_requests_at_once() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(worker.address, settings=PATIENT) as fleet:
        await eventually(fleet.ready)
        watched = fleet.workers[worker.address]
        assert watched.current is not None
        incarnation, followers = watched.current, [Follower() for _ in range(5)]
        for number, follower in enumerate(followers):
            watched.decode_stream.follow(f"r{number}", incarnation.info.epoch, follower)
        worker.watch_mute = worker.frames_mute = True
        await eventually(lambda: watched.is_suspect)
        assert not incarnation.lost.is_set()
        assert fleet.suspects == {(worker.address, incarnation.info.epoch)}
        await asyncio.wait_for(incarnation.lost.wait(), 60)
        assert all(follower.lost.is_set() for follower in followers), "the same moment"
        assert not fleet.suspects, "it is lost"
        worker.watch_mute = worker.frames_mute = False
        await eventually(fleet.ready)
        await worker.kill()


async def test_a_worker_heard_on_one_stream_is_alive() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(worker.address, settings=PATIENT) as fleet:
        await eventually(fleet.ready)
        watched, follower = fleet.workers[worker.address], Follower()
        incarnation = watched.current
        assert incarnation is not None
        watched.decode_stream.follow("r0", incarnation.info.epoch, follower)
        worker.frames_mute = True
        await eventually(lambda: not watched.decode_stream.attached)  # only the stream broke
        worker.frames_mute = False
        await eventually(lambda: watched.decode_stream.attached)
        assert not follower.lost.is_set()
        assert not incarnation.lost.is_set()
        watched.decode_stream.unfollow("r0")  # else it is lost now, with the worker or because the fleet stops
        await worker.kill()


def has_news(incarnation: Incarnation, then: float) -> bool:
    return incarnation.reported_at > then


def watches_again(worker: StubWorker) -> bool:
    return worker.num_watches > worker.num_watches_ended


async def test_a_worker_whose_watch_breaks_is_alive_while_its_tokens_come() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(worker.address, settings=PATIENT) as fleet:
        await eventually(fleet.ready)
        incarnation = fleet.workers[worker.address].current
        assert incarnation is not None
        for _ in range(3):
            reported_at = incarnation.reported_at
            await eventually(partial(has_news, incarnation, reported_at))
            worker.num_watches_ended = worker.num_watches
            await eventually(partial(watches_again, worker))
        assert fleet.workers[worker.address].current is incarnation
        assert not incarnation.lost.is_set()
        await worker.kill()


async def test_another_process_at_the_address_is_another_worker() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(worker.address, settings=PATIENT) as fleet:
        await eventually(fleet.ready)
        incarnation = fleet.workers[worker.address].current
        assert incarnation is not None
        worker.epoch += 1
        worker.num_watches_ended = worker.num_watches
        await asyncio.wait_for(incarnation.lost.wait(), 60)
        await eventually(fleet.ready)
        current = fleet.workers[worker.address].current
        assert current is not None and current.info.epoch == worker.epoch
        await worker.kill()


async def test_a_worker_whose_streams_both_end_is_lost() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(worker.address, settings=PATIENT) as fleet:
        await eventually(fleet.ready)
        incarnation = fleet.workers[worker.address].current
        assert incarnation is not None
        await worker.kill()
        await asyncio.wait_for(incarnation.lost.wait(), 60)


async def test_a_watch_that_breaks_again_and_again_is_opened_now_and_then() -> None:
    worker = await StubWorker("d0", (DECODE,)).start()
    async with running_fleet(worker.address, settings=PATIENT) as fleet:
        await eventually(fleet.ready)
        worker.watch_ends, before = True, worker.num_watches
        await asyncio.sleep(1.0)
        assert worker.num_watches - before < 20, "without a pause it is 150"
        worker.watch_ends = False
        await worker.kill()


async def test_a_prefill_worker_has_one_stream_and_is_lost_by_it() -> None:
    worker = await StubWorker("p0", (PREFILL,)).start()
    async with running_fleet(worker.address, settings=PATIENT) as fleet:
        await eventually(fleet.views)
        incarnation = fleet.workers[worker.address].current
        assert incarnation is not None
        worker.watch_mute = True
        await eventually(lambda: bool(fleet.suspects))
        await asyncio.wait_for(incarnation.lost.wait(), 60)
        await worker.kill()


def test_a_loss_is_one_failure_however_many_requests_it_costs() -> None:
    judged, worker = CircuitBreaker(HealthLimits(jitter=0.0)), ("w:1", 1)
    for number in range(20):
        judged.failed(worker, Role.DECODE, 5.0 + number / 100, "no sign of life", lost=True)
    assert judged.state(worker, Role.DECODE) is State.CLOSED
    for later in (6.5, 8.0):
        judged.failed(worker, Role.DECODE, later, "no sign of life", lost=True)
    assert judged.state(worker, Role.DECODE) is State.OPEN, "three losses in a row are three failures"


def test_a_worker_that_is_lost_again_and_again_is_ejected() -> None:
    worker, judged = ("slow:1", 1), CircuitBreaker(HealthLimits(loss_s=1.0))
    for number in range(8):
        judged.failed(worker, Role.DECODE, 5.0 + 0.9 * number, "no sign of life", lost=True)
    assert judged.state(worker, Role.DECODE) is State.OPEN
    judged.chosen(worker, Role.DECODE, 100.0)
    assert judged.state(worker, Role.DECODE) is State.HALF_OPEN
    for now in (100.1, 100.2):
        judged.failed(worker, Role.DECODE, now, "no sign of life", lost=True)
    assert judged.state(worker, Role.DECODE) is State.OPEN, "a probe that is lost has failed"


class Clock:
    """Stands in for the loop: time passes when a test says so."""

    def __init__(self) -> None:
        self.now, self.due = 0.0, list[tuple[float, Callable[[], None]]]()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        self.due.append((self.now + delay, callback))

    def run(self, until: float) -> None:
        while self.due and self.due[0][0] <= until:
            self.now, callback = self.due.pop(0)
            callback()


def test_a_stream_is_waited_for_as_long_as_its_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that paused for 0.9 s may be silent for 2.25 s, on each of its streams, too."""
    clock, ended, limits_s = Clock(), list[float](), [1.0]
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    watchdog = Watchdog(lambda: limits_s[-1], lambda: ended.append(clock.now), lambda: False)
    watchdog.__enter__()
    clock.run(0.95)
    watchdog.heard()
    limits_s.append(2.25)
    clock.run(3.0)
    assert ended == []
    clock.run(4.0)
    [at] = ended
    assert at == pytest.approx(0.9 + 2.25, abs=0.11)
