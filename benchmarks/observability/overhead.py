"""What it costs a mesh to be followed: throughput and CPU time, beside a mesh of which nobody hears."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.cpu_time import process_cpu_ns
from benchmarks.harness import Figure, say
from benchmarks.observability.looking import scraper
from benchmarks.observability.turns import AT_ONCE, Turn, jobs, ratios, spread
from benchmarks.observability.ways import ALL, OFF, ON, TRACES, Lookers, Side, Way
from benchmarks.router.options import Options
from benchmarks.router.processes import running

GOAL = 0.98
ROUNDS, SIZE, QUICK_SIZE = 8, 24, 12
"""Pairs of turns of each way. Requests of a turn: seven to ten seconds' work."""
IDLE_S = 5.0
TELLING = ("router", "console", "collector", "scraper")
KINDS = ("prefill", "decode", *TELLING)
Taken = Sequence[tuple[Way, Turn]]


async def figures(options: Options) -> list[Figure]:
    """The mesh that is off beside one of the others: off, on, off, on …, so that each turn is compared with those beside it."""
    with tempfile.TemporaryDirectory() as folder, running("benchmarks.observability.sink") as sink:
        async with scraper(Path(folder)) as scraping:
            lookers, taken, idle = Lookers(sink, sink.hear()["address"], scraping), list[Taken](), list[Figure]()
            async with lookers.side(OFF, options.model) as off:
                for way in ON:
                    async with lookers.side(way, options.model) as on:
                        taken.append(await _take_turns(off, on, options))
                        idle += [await _idle_figure(side) for side in (off, on) if way is ALL]
            return [*_throughput_figures(taken), *_cpu_figures(taken, scraping.name), *idle]


async def _take_turns(off: Side, on: Side, options: Options) -> Taken:
    """The first of each is not counted: it is slower, whatever is told to whom."""
    size = QUICK_SIZE if options.quick else SIZE
    order = [off, on] * (2 if options.quick else ROUNDS) + [off]
    for number, side in enumerate((off, on)):
        await side.take_turn(jobs(-1 - number, size))
    taken: list[tuple[Way, Turn]] = []
    for number, side in enumerate(order):
        taken.append((side.way, await side.take_turn(jobs(number, size))))
        say(f"turn {number + 1}/{len(order)}  {side.way.name}: {taken[-1][1].tokens_per_s:.1f} tokens/s")
    return taken


def _throughput_figures(taken: Sequence[Taken]) -> list[Figure]:
    off = median(turn.tokens_per_s for each in taken for way, turn in each if way is OFF)
    work = f"SmolLM2-135M, one router, one prefill and one decode worker, {AT_ONCE} requests at a time"
    found = _compared(taken, lambda turn: turn.tokens_per_s)
    return [
        Figure("output tokens per second, off", round(off, 1), "tokens/s", "higher", peer=work),
        *(_ratio_figure("throughput", way, found[way], "higher", GOAL if way in (TRACES, ALL) else None) for way in (OFF, *ON)),
    ]


def _cpu_figures(taken: Sequence[Taken], scraper_name: str) -> list[Figure]:
    """All processes of a mesh, and whoever takes what it tells, together; then each kind."""
    found = _compared(taken, lambda turn: turn.cpu_ms(""))
    turns = {way: [turn for each in taken for its, turn in each if its is way] for way in (OFF, *ON)}
    return [
        *(_ratio_figure("CPU time per request", way, found[way], "lower") for way in turns),
        *(_added_figure(turns[way], turns[OFF], way) for way in ON),
        *(_each_figure(turns[way], way, scraper_name) for way in turns),
    ]


def _added_figure(on: Sequence[Turn], off: Sequence[Turn], way: Way) -> Figure:
    """Without the workers: what their engines take varies more from turn to turn than what telling adds there."""
    added = median(turn.cpu_ms(*TELLING) for turn in on) - median(turn.cpu_ms(*TELLING) for turn in off)
    share = added / median(turn.cpu_ms("") for turn in off)
    name = f"CPU time that {way.name} add in the router and beside the mesh, ÷ all of it, off"
    return Figure(name, round(share, 4), "ratio", "lower", peer=f"{added:.2f} ms per request")


def _ratio_figure(
    name: str, way: Way, found: Sequence[float], better: Literal["higher", "lower"], goal: float | None = None
) -> Figure:
    return Figure(f"{name}, {way.name} ÷ off", round(median(found), 4), "ratio", better, goal=goal, peer=spread(found))


def _each_figure(turns: Sequence[Turn], way: Way, scraper_name: str) -> Figure:
    each = {kind: median(turn.cpu_ms(kind) for turn in turns) for kind in KINDS}
    told = ", ".join(f"{scraper_name if kind == 'scraper' else kind} {ms:.2f}" for kind, ms in each.items() if ms)
    whole = median(turn.cpu_ms("") for turn in turns)
    return Figure(f"CPU time per request, {way.name}", round(whole, 2), "ms", "lower", peer=told)


def _compared(taken: Sequence[Taken], value: Callable[[Turn], float]) -> dict[Way, list[float]]:
    found: dict[Way, list[float]] = {way: [] for way in (OFF, *ON)}
    for each in taken:
        for way, their in ratios([(way, value(turn)) for way, turn in each], OFF).items():
            found[way] += their
    return found


async def _idle_figure(side: Side) -> Figure:
    """What a mesh that waits for its turn takes from the one that works."""
    pids = side.mesh.pids.values()
    before = sum(map(process_cpu_ns, pids))
    await asyncio.sleep(IDLE_S)
    cores = (sum(map(process_cpu_ns, pids)) - before) / 1e9 / IDLE_S
    return Figure(f"a mesh without work, {side.way.name}", round(100 * cores, 2), "% of a core", "lower")
