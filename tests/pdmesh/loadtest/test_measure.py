"""The search for a capacity, against a server of which the rate that it bears is known."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

import pytest

from pdmesh.loadtest import runner
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.measure import Measurement, Search, decided_s, find_capacity, measure, search_capacity, window_at
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome
from pdmesh.loadtest.result import Result
from pdmesh.loadtest.targets.target import Ask, Done, Event, Fleet, TargetError, TargetInfo, Tokens
from pdmesh.loadtest.workload import Arrivals, TrafficClass, Workload

GOALS = Objectives(ttft_ms=200, tpot_ms=100)


class OneByOne:
    """Answers one request after the other, each in `service_s`: a queue that grows without end above 1/service_s."""

    def __init__(self, service_s: float) -> None:
        self._service_s = service_s
        self._free_at = 0.0
        self.num_given_up = 0

    async def check(self) -> TargetInfo:
        return TargetInfo("m")

    def prepare(self, ask: Ask) -> object:
        return ask

    async def stream(self, prepared: object) -> AsyncGenerator[Event, None]:
        self._free_at = max(self._free_at, time.monotonic()) + self._service_s
        try:
            await asyncio.sleep(self._free_at - time.monotonic())
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        yield Tokens(1)
        yield Done()

    async def fleet(self) -> Fleet | None:
        return None

    async def close(self) -> None:
        return None


def measurement(rate: float, duration_s: float, max_lateness_s: float = 60.0) -> Measurement:
    traffic = TrafficClass(output_tokens=fixed(1))
    workload = Workload(Arrivals("constant", rate), (traffic,))
    return Measurement(workload, ObjectiveBook(GOALS), 1, duration_s, max_lateness_s=max_lateness_s)


async def test_the_capacity_of_a_queue_is_found() -> None:
    """At 0.04 s each: 25 a second for ever; a little more within a second, until the queue is 0.2 s long."""
    found = await find_capacity(OneByOne(0.04), measurement(10, 1.5), (Search(0.9, 10, tolerance=0.3, windows=1),))
    (capacity,) = found.capacities
    # One-sided where a busy machine could only make the server slower.
    assert capacity.rate is not None and capacity.rate <= 40 and capacity.failed_rate is not None
    assert found.result.summary.attainment is not None and found.result.summary.attainment >= 0.9
    assert found.trials[0].rate == 10


def test_the_window_of_a_rate_is_the_same_whatever_was_measured_before() -> None:
    one, again = (window_at(measurement(rate, 1.0), 12.5, 1) for rate in (10, 20))
    assert (one.seed, one.workload) == (again.seed, again.workload) and one.workload.arrivals.rate == 12.5
    others = {window_at(measurement(10, 1.0), rate, number).seed for rate, number in ((12.5, 0), (12.5, 2), (13.0, 1))}
    assert len(others | {one.seed}) == 4


async def test_a_fleet_that_could_not_be_told_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_FLEET_PERIOD_S", 0.02)
    answers: Iterator[TargetError | Fleet] = iter([TargetError(Outcome.TIMEOUT, "late"), *[Fleet(1, 2, 0, 0)] * 1000])

    class Telling(OneByOne):
        async def fleet(self) -> Fleet | None:
            answer = next(answers)
            if isinstance(answer, TargetError):
                raise answer
            return answer

    result = await measure(Telling(0.001), measurement(20, 0.3))
    assert len(result.fleet) > 1 and result.fleet[0].num_decode == 2


async def test_what_cannot_be_good_any_more_is_not_waited_for() -> None:
    target = OneByOne(30.0)
    started = time.monotonic()
    found = await find_capacity(target, measurement(20, 0.6), (Search(0.9, 20, min_rate=15, windows=1),))
    assert time.monotonic() - started < 15 and target.num_given_up == 12
    assert found.capacities[0].rate is None and found.result.summary.outcomes == {"timeout": 12}


async def test_a_load_test_that_is_late_finds_nothing() -> None:
    found = await find_capacity(OneByOne(0.01), measurement(50, 0.2, max_lateness_s=1e-9), (Search(0.9, 50, windows=1),))
    assert found.capacities[0].rate is None and found.trials == () and "at 50 requests/s" in found.stopped
    assert not found.result.valid and not found.interrupted


async def test_what_held_before_the_load_test_was_late_is_kept_and_no_search_goes_as_high_again() -> None:
    target = OneByOne(0.001)
    asked = []

    async def run(window: Measurement) -> Result:
        asked.append(rate := window.workload.arrivals.rate)
        return await measure(target, replace(window, max_lateness_s=1e-9 if rate >= 40 else 60.0))

    searches = (Search(0.99, 10, windows=1), Search(0.9, 10, windows=1))
    found = await search_capacity(run, measurement(10, 0.2), searches)
    assert asked == [10, 20, 40] and "at 40 requests/s" in found.stopped
    assert [(capacity.rate, capacity.failed_rate) for capacity in found.capacities] == [(20, None)] * 2
    assert found.result.valid and found.as_json()["stopped"] == found.stopped


@pytest.mark.parametrize(
    ("goals", "seconds"),
    [
        (Objectives(ttft_ms=500, tpot_ms=100), 10 + 0.5 + 0.3),
        (Objectives(ttft_ms=500), math.inf),
        (Objectives(e2e_ms=2000), 12),
        (Objectives(ttft_ms=500, tpot_ms=100, e2e_ms=600), 10.6),
        (Objectives(), math.inf),
    ],
)
def test_when_all_is_decided(goals: Objectives, seconds: float) -> None:
    workload = Workload(Arrivals("constant", 1), (TrafficClass(output_tokens=fixed(4)),))
    assert decided_s(Measurement(workload, ObjectiveBook(goals), 1, 10)) == pytest.approx(seconds)
