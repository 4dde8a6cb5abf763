"""What running streams feel of long prompts that arrive: separated, and beside it one engine on the same two cores.

A few streams run all the time, one after the other in each place. First alone, then while prompts of 2 000 tokens come at a
steady rate. TPOT is a stream's mean time per token; a stream counts to the time in which it began.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from benchmarks.harness import Figure, Options, beside, say
from benchmarks.router.meshes import SEPARATED, TWO_CORES, Call, Running, Shape, asking, call, running, warm_up
from pdmesh.loadtest.stats import quantile
from pdmesh.loadtest.targets.target import Target

STREAMS, STREAM_INPUT, STREAM_OUTPUT, QUICK_OUTPUT = 4, 64, 160, 16
PROMPT, PROMPT_OUTPUT, PROMPT_PERIOD_S = 2000, 2, 3.0
GOAL = 1.5


@dataclass(frozen=True)
class Felt:
    """Of the streams, in seconds: alone (p50) and disturbed (p99)."""

    idle_tpot_p50: float
    idle_itl_p50: float
    tpot_p99: float
    itl_p99: float
    prompt_ttft_p50: float

    @property
    def ratio(self) -> float:
        return self.tpot_p99 / self.idle_tpot_p50


def felt(idle: Sequence[Call], disturbed: Sequence[Call], prompts: Sequence[Call]) -> Felt:
    """Pure. Raises ValueError where one of them has none that was answered."""
    return Felt(
        _quantile([one.tpot_s for one in idle if one.tpot_s], 0.5),
        _quantile(_gaps(idle), 0.5),
        _quantile([one.tpot_s for one in disturbed if one.tpot_s], 0.99),
        _quantile(_gaps(disturbed), 0.99),
        _quantile([one.ttft_s for one in prompts if math.isfinite(one.ttft_s)], 0.5),
    )


def _gaps(calls: Sequence[Call]) -> list[float]:
    return [later - earlier for one in calls for earlier, later in pairwise(one.times)]


def _quantile(values: Sequence[float], q: float) -> float:
    if not values:
        raise ValueError("no stream was answered: the window is too short, or the mesh does not serve")
    return quantile(sorted(values), q)


async def _streams(target: Target, seconds: float, num_output: int, tag: str) -> list[Call]:
    """Keeps STREAMS of them running for so long; returns all, the last ones to their end."""
    calls: list[Call] = []
    until = asyncio.get_running_loop().time() + seconds

    async def place(number: int) -> None:
        for turn in count():
            if asyncio.get_running_loop().time() >= until:
                return
            calls.append(await call(target, f"{tag}-{number}-{turn}", STREAM_INPUT, num_output, seed=7))

    await asyncio.gather(*(place(number) for number in range(STREAMS)))
    return calls


async def _prompts(target: Target, period_s: float, into: list[Call]) -> None:
    """One every period, whatever became of those before, until it is cancelled."""

    async def one(number: int) -> None:
        into.append(await call(target, f"prompt-{number}", PROMPT, PROMPT_OUTPUT, seed=8))

    async with asyncio.TaskGroup() as group:
        for number in count():
            group.create_task(one(number))
            await asyncio.sleep(period_s)


async def _disturbed(streams: Target, prompts: Target, seconds: float, num_output: int) -> tuple[list[Call], list[Call]]:
    answered: list[Call] = []
    async with beside(_prompts(prompts, PROMPT_PERIOD_S, answered)):
        return await _streams(streams, seconds, num_output, "disturbed"), answered


async def _measure(system: Running, mode: str, options: Options) -> Felt:
    """`mode` of the long prompts."""
    num_output = int(options.pick(STREAM_OUTPUT, QUICK_OUTPUT))
    async with asking(system.mesh, mode=mode) as prompts:
        await warm_up(system.target, options.pick(5.0, 1.0))
        await warm_up(prompts, options.pick(3.0, 1.0))
        idle = await _streams(system.target, options.pick(25.0, 3.0), num_output, "idle")
        disturbed, answered = await _disturbed(system.target, prompts, options.pick(75.0, 7.0), num_output)
    result = felt(idle, disturbed, answered)
    say(f"{system.shape.name}: TPOT p99 {result.ratio:.3g} times its idle p50; {len(disturbed)} streams, {len(answered)} prompts")
    return result


async def _figures_of(shape: Shape, mode: str, goal: float | None, options: Options) -> list[Figure]:
    async with running(shape, options) as system:
        seen = await _measure(system, mode, options)
    while_prompts = f"{shape.name}: while {PROMPT}-token prompts arrive every {PROMPT_PERIOD_S:g} s"
    return [
        Figure(f"{while_prompts}: TPOT p99 of running streams over their idle p50", seen.ratio, "times", "lower", goal),
        Figure(f"{while_prompts}: ITL p99 over idle p50", seen.itl_p99 / seen.idle_itl_p50, "times", "lower"),
        Figure(f"{while_prompts}: TPOT p99", 1e3 * seen.tpot_p99, "ms", "lower"),
        Figure(f"{while_prompts}: TTFT p50 of those prompts", 1e3 * seen.prompt_ttft_p50, "ms", "lower"),
        Figure(f"{shape.name}: idle TPOT p50, {STREAMS} streams", 1e3 * seen.idle_tpot_p50, "ms", "lower"),
    ]


async def figures(options: Options) -> list[Figure]:
    """Separated, then aggregated."""
    return [*await _figures_of(SEPARATED, "remote", GOAL, options), *await _figures_of(TWO_CORES, "local", None, options)]
