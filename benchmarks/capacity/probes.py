"""Windows of one system. Each is measured once and kept in a file, so that a run that was interrupted goes on; the system runs
only while there is something to measure."""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness import say
from benchmarks.peers.environments import PeerError
from benchmarks.peers.systems import System
from benchmarks.router.meshes import alone
from benchmarks.router.mixes import Idle, objectives
from pdmesh.loadtest import result as loadtest_result
from pdmesh.loadtest.arrivals import Distribution, fixed
from pdmesh.loadtest.measure import Measurement, Search, measure
from pdmesh.loadtest.progress import Progress
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome
from pdmesh.loadtest.result import Result
from pdmesh.loadtest.runner import RunSettings
from pdmesh.loadtest.targets.target import Ask, Said, Target, TargetError, Tokens
from pdmesh.loadtest.workload import Arrivals, Limits, Segment, TrafficClass, Workload
from pdmesh.runtime.child import StartFailed

# What everybody is asked, and how long: the same words at the same times at a given rate.


INPUT_TOKENS, OUTPUT_TOKENS, MAX_INPUT_TOKENS = 420, 64, 720
TTFT_MS, TPOT_MS = 500.0, 40.0
OBJECTIVES = Objectives(TTFT_MS, TPOT_MS, quantile=0.9)
LARGEST_SHARE = 0.5
"""Where one request alone takes more than this part of them, no rate keeps them: the mixes' rule takes their place."""
TRAFFIC = TrafficClass(input_tokens=Distribution("normal", (INPUT_TOKENS, 100)), output_tokens=fixed(OUTPUT_TOKENS))
SEED = 20
# After its confirmation a system is asked at so many times its capacity, too.
ABOVE = 1.15


@dataclass(frozen=True)
class Plan:
    """Seconds of a window, and how closely the capacity is looked for. `tolerance`: as in Search."""

    duration_s: float = 27.0
    warmup_s: float = 3.0
    first_rate: float = 1.0
    min_rate: float = 0.2
    max_rate: float = 64.0
    tolerance: float = 0.07
    objectives: Objectives = OBJECTIVES

    def measurement(self, target: str, model: str) -> Measurement:
        """A window, but for its rate. What it says of its own delay is shown: on two cores it shares them with what it loads."""
        workload = Workload(classes=(TRAFFIC,), limits=Limits(MAX_INPUT_TOKENS, OUTPUT_TOKENS))
        settings = {
            "input_tokens": f"{TRAFFIC.input_tokens}, at most {MAX_INPUT_TOKENS}",
            "output_tokens": OUTPUT_TOKENS,
            "arrivals": "poisson",
            "seed": SEED,
        }
        return Measurement(
            workload,
            ObjectiveBook(self.objectives),
            SEED,
            self.duration_s,
            self.warmup_s,
            max_lateness_s=math.inf,
            target=target,
            model=model,
            settings=settings,
        )

    @property
    def search(self) -> Search:
        return self._search(self.objectives.quantile)

    @property
    def strict_search(self) -> Search:
        """Of which only what the other search measured anyway is told."""
        return self._search(0.99)

    @property
    def key(self) -> str:
        """Tells windows of one plan from those of another."""
        return hashlib.sha256(repr((self, TRAFFIC, SEED, MAX_INPUT_TOKENS)).encode()).hexdigest()[:12]

    def _search(self, attainment: float) -> Search:
        return Search(attainment, self.first_rate, self.max_rate, self.min_rate, self.tolerance, windows=1)


def objectives_for(idle: Idle) -> Objectives:
    """Return what is asked of a machine on which one request takes that, with nothing else to do. Pure."""
    if max(1e3 * idle.ttft_s / TTFT_MS, 1e3 * idle.tpot_s / TPOT_MS) <= LARGEST_SHARE:
        return OBJECTIVES
    return replace(objectives(idle), quantile=OBJECTIVES.quantile)


async def ask_alone(system: System) -> Idle:
    """Medians of requests one after the other. Raises what `System.start` does."""
    async with system.start() as target:
        return Idle(*await alone(target, INPUT_TOKENS, OUTPUT_TOKENS, SEED))


FULL = Plan()
# Enough to see that everybody works; not to measure anybody.
QUICK = Plan(duration_s=8.0, warmup_s=1.0, min_rate=0.5, max_rate=8.0, tolerance=0.5)


# Before anything counts: as many requests as fill the system's batches, whatever it compiles for them.
WARM_UP_RATE, WARM_UP_S, WARM_UP_TIMEOUT_S = 1.0, 12.0, 60.0
# After a window: how long until one short request alone must be answered. Who is not back by then does not come back.
SETTLE_S = 60.0


class Probes:
    """Owner of the system's processes between `__aenter__` and `__aexit__`. `num_stuck`: how often it had to be started anew."""

    def __init__(self, system: System, folder: Path) -> None:
        self.num_stuck = 0
        self._system = system
        self._folder = folder
        self._stack = AsyncExitStack()
        self._target: Target | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def run(self, window: Measurement) -> Result:
        """The window's result, from its file if it is known. Raises PeerError if the system cannot be made to serve."""
        rate = window.workload.arrivals.rate
        path = self._folder / f"{self._system.key}-{rate:.6g}-{window.seed}.json"
        if path.exists():
            return loadtest_result.read(str(path))
        target = await self._serving(window)
        say(f"{self._system.name}: {rate:.4g} requests/s for {window.warmup_s + window.duration_s:g} s")
        total_s = window.warmup_s + window.duration_s
        measured = await measure(target, window, lambda runner: Progress(sys.stderr, runner, total_s))
        if not measured.interrupted:
            _write(measured, path)
            await self._settle(target)
        return measured

    async def _serving(self, window: Measurement) -> Target:
        if self._target is None:
            say(f"{self._system.name}: starting")
            try:
                target = await self._stack.enter_async_context(self._system.start())
                await target.check()
                await _warm_up(target, window)
            except (StartFailed, TargetError, OSError) as error:
                raise PeerError(str(error)) from error
            self._target = target
        return self._target

    async def _settle(self, target: Target) -> None:
        """Waits until the system is idle; ends it if it does not come back from what it was given: the next window starts it."""
        reason = await not_answering(target, SETTLE_S)
        if reason is not None:
            say(f"{self._system.name}: is stuck after this window ({reason}); it is started anew")
            self.num_stuck += 1
            await self._stop()

    async def _stop(self) -> None:
        self._target = None
        await self._stack.aclose()


async def _warm_up(target: Target, window: Measurement) -> None:
    """Some load, of prompts that come again nowhere. PeerError if nothing is answered."""
    workload = replace(window.workload, arrivals=Arrivals(rate=WARM_UP_RATE))
    run = RunSettings(timeout_s=WARM_UP_TIMEOUT_S, request_id_prefix="warm-up")
    warm_up = replace(window, workload=workload, seed=window.seed + 1, duration_s=WARM_UP_S, warmup_s=0.0, run=run)
    summary = (await measure(target, warm_up)).summary
    if not summary.outcomes.get(Outcome.OK.value):
        raise PeerError(f"answers no request: {next(iter(summary.errors), 'none was due')}")


async def not_answering(target: Target, timeout_s: float) -> str | None:
    """Why one short request is not answered; None: it is."""
    said = (Said((Segment("alone", 16),)),)
    prepared = target.prepare(Ask("alone", 0, TrafficClass(), said, 4, timeout_s))
    try:
        async with asyncio.timeout(timeout_s), aclosing(target.stream(prepared)) as events:
            num_tokens = sum([event.count async for event in events if isinstance(event, Tokens)])
    except TimeoutError:
        return f"no answer to a single request within {timeout_s:g} s"
    except TargetError as error:
        return error.message
    return None if num_tokens else "an answer without a token"


def _write(result: Result, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    loadtest_result.write(result, str(path.with_suffix(".part")))
    path.with_suffix(".part").rename(path)
