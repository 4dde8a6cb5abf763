"""One measured run, from a workload to its result; and a search over such runs for the highest rate that keeps the objectives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pdmesh.loadtest.capacity import Capacity, Search, Trial, found
from pdmesh.loadtest.objectives import ObjectiveBook
from pdmesh.loadtest.result import Result, make_result
from pdmesh.loadtest.runner import Runner, RunSettings
from pdmesh.loadtest.stats import Window
from pdmesh.loadtest.target import Target
from pdmesh.loadtest.workload import Workload, plan

Watch = Callable[[Runner], AbstractAsyncContextManager[object]]


@dataclass(frozen=True)
class Measurement:
    """What is run and how it is judged. Requests that are due in the first `warmup_s` seconds do not count; `duration_s` is the
    time that does. Beyond `max_lateness_s` (p99) of its own delay the load test calls its result invalid."""

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


async def measure(target: Target, measurement: Measurement, watch: Watch = nullcontext) -> Result:
    """Runs it, within what `watch` makes of the runner (progress). Cancelled (Ctrl-C), it returns what there is: `interrupted`
    says so, and the window ends there."""
    total_s = measurement.warmup_s + measurement.duration_s
    seed = measurement.seed
    prefix = f"{measurement.run.request_id_prefix}-{seed}"
    runner = Runner(target, replace(measurement.run, stop_turns_s=total_s, request_id_prefix=prefix, seed=seed))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    end_s = total_s
    try:
        async with watch(runner):
            log = await runner.run(plan(measurement.workload, seed, total_s))
    except asyncio.CancelledError:
        log = runner.log
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
    """The capacity for each share that was asked for, the trials that led there, and the result of the last of them at the
    highest rate that held (of the very last one, where none did)."""

    capacities: tuple[Capacity, ...]
    trials: tuple[Trial, ...]
    result: Result

    def as_json(self) -> dict[str, object]:
        return {
            "capacities": [capacity.as_json() for capacity in self.capacities],
            "trials": [{"rate": t.rate, "attainment": t.attainment, "goodput": t.goodput} for t in self.trials],
        }


class LateError(Exception):
    """The load test itself could not keep up: what it measured says nothing of the target."""


def decided_s(measurement: Measurement) -> float:
    """Seconds of a run after which no request that still runs can be good: the last one was due, and the longest answer had all
    the time that its objectives allow. Until then nothing is given up, so nothing gets room that it would not have had."""
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
    """Searches for each attainment in turn; all of them learn from all trials. Raises LateError."""
    trials: list[Trial] = []
    results: dict[float, Result] = {}
    result: Result | None = None
    for search in searches:
        while (rate := search.next_rate(trials)) is not None:
            workload = replace(measurement.workload, arrivals=replace(measurement.workload.arrivals, rate=rate))
            # Another seed for each window, or all windows of a rate would be the same one, out of the target's caches.
            trying = replace(measurement, workload=workload, seed=measurement.seed + len(trials))
            trying = replace(trying, run=replace(trying.run, give_up_s=decided_s(trying)))
            result = await measure(target, trying, watch)
            if result.interrupted:
                raise asyncio.CancelledError
            if not result.valid:
                raise LateError(f"at {rate:.4g} requests/s: {'; '.join(result.reasons)}")
            trial = Trial(rate, result.summary.attainment or 0.0, result.summary.goodput)
            trials.append(trial)
            results[rate] = result
            on_trial(trial)
    capacities = tuple(found(search, trials) for search in searches)
    best = max((capacity.rate for capacity in capacities if capacity.rate is not None), default=None)
    assert result is not None
    return Found(capacities, tuple(trials), result if best is None else results[best])
