"""Measures one run, from a workload to its result; and searches over such runs for the highest rate that keeps the objectives."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pdmesh.loadtest.record import ObjectiveBook
from pdmesh.loadtest.result import Result, make_result
from pdmesh.loadtest.runner import Runner, RunSettings
from pdmesh.loadtest.stats import Window
from pdmesh.loadtest.targets.target import Target
from pdmesh.loadtest.workload import Workload, plan

# The search for the highest rate at which enough requests keep their objectives. Pure.
#
# The rate doubles until it is too high, then the interval between the highest rate that held and the lowest that did not is
# halved until it is narrow. A rate holds if most of its windows do, further ones (a confirmation) included; the windows of a rate
# end as soon as that is decided.


@dataclass(frozen=True)
class Trial:
    """Hold one window at a rate: the share of requests that kept their objectives, and how many did so per second."""

    rate: float
    attainment: float
    goodput: float


@dataclass(frozen=True)
class Search:
    """Configure a search. `tolerance`: how much higher than the answer the lowest rate that fails may be, as a share."""

    attainment: float = 0.9
    first_rate: float = 1.0
    max_rate: float = 10_000.0
    min_rate: float = 0.01
    tolerance: float = 0.05
    windows: int = 3

    def holds(self, rate: float, trials: Sequence[Trial]) -> bool | None:
        """Return whether most windows at `rate` attained enough, of `windows` or of as many as there are; None while that is
        open."""
        verdicts = [trial.attainment >= self.attainment for trial in trials if trial.rate == rate]
        total = max(self.windows, len(verdicts))
        needed = total // 2 + 1
        if sum(verdicts) >= needed:
            return True
        return False if len(verdicts) - sum(verdicts) > total - needed else None

    def bounds(self, trials: Sequence[Trial]) -> tuple[float | None, float | None]:
        """Return the highest rate that held below the lowest that did not, and that one; None: there is none yet.

        A rate that held above one that failed probably did so by chance: it does not count."""
        verdicts = {rate: self.holds(rate, trials) for rate in sorted({trial.rate for trial in trials})}
        failed = min((rate for rate, held in verdicts.items() if held is False), default=None)
        held = [rate for rate, held in verdicts.items() if held and (failed is None or rate < failed)]
        return max(held, default=None), failed

    def next_rate(self, trials: Sequence[Trial]) -> float | None:
        """Return the rate of the next window; None when the search is over."""
        for trial in reversed(trials):
            if self.holds(trial.rate, trials) is None:
                return trial.rate
        held, failed = self.bounds(trials)
        if held is None and failed is None:
            return min(self.first_rate, self.max_rate)
        if failed is None:
            assert held is not None
            return None if held >= self.max_rate else min(2 * held, self.max_rate)
        if held is None:
            return None if failed / 2 < self.min_rate else failed / 2
        return None if failed <= held * (1 + self.tolerance) else (held + failed) / 2


@dataclass(frozen=True)
class Capacity:
    """Hold the answer: `rate` requests per second held and `failed_rate` did not. None for `rate`: not even the lowest one held;
    None for `failed_rate`: the highest allowed rate held, so the capacity may be higher."""

    attainment: float
    rate: float | None
    failed_rate: float | None
    goodput: float | None

    def as_json(self) -> Mapping[str, float | None]:
        return {
            "attainment": self.attainment,
            "rate": self.rate,
            "failed_rate": self.failed_rate,
            "goodput": self.goodput,
        }


def found(search: Search, trials: Sequence[Trial]) -> Capacity:
    """Return the answer, once `next_rate` is None (before that: what is known so far)."""
    held, failed = search.bounds(trials)
    at_best = [trial.goodput for trial in trials if trial.rate == held]
    return Capacity(search.attainment, held, failed, sum(at_best) / len(at_best) if at_best else None)


Watch = Callable[[Runner], AbstractAsyncContextManager[object]]


@dataclass(frozen=True)
class Measurement:
    """Configure what is run and how it is judged. Requests that are due in the first `warmup_s` seconds do not count;
    `duration_s` is the time that does. With `finish_sessions`, sessions that have started go on after it, and it ends with the
    last request. If its own delay (p99) exceeds `max_lateness_s`, the load test calls its result
    invalid."""

    workload: Workload
    book: ObjectiveBook
    seed: int
    duration_s: float
    warmup_s: float = 0.0
    run: RunSettings = field(default_factory=RunSettings)
    max_lateness_s: float = 0.01
    target: str = ""
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    finish_sessions: bool = False


async def measure(target: Target, measurement: Measurement, watch: Watch = nullcontext) -> Result:
    """Run it, within `watch` of the runner (progress). Cancelled (Ctrl-C), it returns what there is: `interrupted` says so, and
    the window ends there."""
    total_s = measurement.warmup_s + measurement.duration_s
    stop_s = math.inf if measurement.finish_sessions else total_s
    seed = measurement.seed
    prefix = f"{measurement.run.request_id_prefix}-{seed}"
    settings = replace(measurement.run, stop_turns_s=stop_s, request_id_prefix=prefix, seed=seed, book=measurement.book)
    runner = Runner(target, settings)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    end_s = total_s
    try:
        async with watch(runner):
            log = await runner.run(plan(measurement.workload, seed, total_s))
        if measurement.finish_sessions:
            end_s = round(max((record.end_s for record in log.records), default=total_s) + 5e-4, 3)
    except asyncio.CancelledError:
        log = runner.log
        log.interrupted = True
        end_s = min(total_s, runner.now_s())
    return make_result(
        log,
        Window(min(measurement.warmup_s, end_s - 1e-9), end_s),
        measurement.book,
        target=measurement.target,
        model=measurement.model,
        started_at=started_at,
        settings=measurement.settings,
        max_lateness_s=measurement.max_lateness_s,
    )


@dataclass(frozen=True)
class Found:
    """Hold the capacity for each requested share, the trials that led there, and the result of the last of them at the highest
    rate that held (of the very last one, if none did). `stopped`: why it ended early, so that a capacity may be higher than
    found; empty: it did not. `interrupted`: it was cancelled (Ctrl-C)."""

    capacities: tuple[Capacity, ...]
    trials: tuple[Trial, ...]
    result: Result
    stopped: str = ""
    interrupted: bool = False

    def as_json(self) -> dict[str, object]:
        return {
            "capacities": [capacity.as_json() for capacity in self.capacities],
            "trials": [{"rate": t.rate, "attainment": t.attainment, "goodput": t.goodput} for t in self.trials],
            "stopped": self.stopped,
        }


def decided_s(measurement: Measurement) -> float:
    """Return the seconds of a run after which no running request can be good: the last one was due, and the longest answer had
    all the time that its objectives allow. Until then nothing is cancelled, so no request gains capacity from it."""
    total_s = measurement.warmup_s + measurement.duration_s
    allowed_ms = 0.0
    for session in plan(measurement.workload, measurement.seed, total_s):
        num_tokens = max(turn.output_tokens for turn in session.turns)
        allowed_ms = max(allowed_ms, measurement.book.of(session.traffic.name).longest_ms(num_tokens))
    return total_s + allowed_ms / 1e3


async def find_capacity(
    target: Target,
    measurement: Measurement,
    searches: tuple[Search, ...],
    watch: Watch = nullcontext,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Found:
    """Search for each attainment in turn; all of them learn from all trials."""
    return await search_capacity(partial(measure, target, watch=watch), measurement, searches, on_trial)


async def search_capacity(
    run: Callable[[Measurement], Awaitable[Result]],
    measurement: Measurement,
    searches: tuple[Search, ...],
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Found:
    """Search with any function that measures one window.

    A window in which the load test itself was too late says nothing about the target: no search goes as high again, and what held
    below is reported. Interrupted, it returns what there is."""
    trials: list[Trial] = []
    results: dict[float, Result] = {}
    result: Result | None = None
    too_fast, stopped = math.inf, ""
    for search in searches:
        while (rate := search.next_rate(trials)) is not None and rate < too_fast:
            result = await run(window_at(measurement, rate, sum(trial.rate == rate for trial in trials)))
            if result.interrupted:
                return _found(searches, trials, results, result, "interrupted")
            if not result.valid:
                too_fast, stopped = rate, f"at {rate:.4g} requests/s: {'; '.join(result.reasons)}"
                break
            trial = trial_of(rate, result)
            trials.append(trial)
            results[rate] = result
            on_trial(trial)
    assert result is not None
    return _found(searches, trials, results, result, stopped)


def _found(
    searches: Sequence[Search], trials: Sequence[Trial], results: Mapping[float, Result], last: Result, stopped: str
) -> Found:
    capacities = tuple(found(search, trials) for search in searches)
    best = max((capacity.rate for capacity in capacities if capacity.rate is not None), default=None)
    result = last if best is None else results[best]
    return Found(capacities, tuple(trials), result, stopped, last.interrupted)


def window_at(measurement: Measurement, rate: float, number: int) -> Measurement:
    """Return the measurement of window `number` at `rate`. Its seed follows from both: another for each, or the windows would
    repeat the same requests, out of the target's caches; the same for every search, so that all targets get the same."""
    workload = replace(measurement.workload, arrivals=replace(measurement.workload.arrivals, rate=rate))
    seed = random.Random(f"{measurement.seed}/{rate:.6g}/{number}").randrange(2**31)
    window = replace(measurement, workload=workload, seed=seed)
    return replace(window, run=replace(window.run, give_up_s=decided_s(window)))


def trial_of(rate: float, result: Result) -> Trial:
    """Return what the search learns from a window."""
    return Trial(rate, result.summary.attainment or 0.0, result.summary.goodput)
