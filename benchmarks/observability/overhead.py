"""What it costs a mesh to be followed: throughput and CPU time, beside a mesh of which nobody hears."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.cpu_time import process_cpu_ns
from benchmarks.harness import Figure, say
from benchmarks.observability.looking import scraper
from benchmarks.observability.turns import AT_ONCE, Turn, jobs, ratios, spread
from benchmarks.observability.ways import ALL, OFF, ON, TRACES, Side, Way, sides
from benchmarks.router.options import Options
from benchmarks.router.processes import running

GOAL = 0.98
IDLE_S = 5.0
KINDS = ("router", "prefill", "decode", "console", "collector", "scraper")
Taken = Sequence[tuple[Way, Turn]]


async def figures(options: Options) -> list[Figure]:
    """Off, on, off, on …: each turn is compared with those beside it."""
    rounds, size = (2, 12) if options.quick else (9, 60)
    with tempfile.TemporaryDirectory() as folder, running("benchmarks.observability.sink") as sink:
        async with scraper(Path(folder)) as scraping, sides(options.model, sink, scraping) as meshes:
            idle = [await _idle_figure(meshes[way]) for way in (OFF, ALL)]
            taken = await _take_turns(meshes, rounds, size)
            return [*_throughput_figures(taken), *_cpu_figures(taken, scraping.name), *idle]


async def _take_turns(meshes: Mapping[Way, Side], rounds: int, size: int) -> Taken:
    """The first of each is not counted: it is slower, whatever is told to whom."""
    for number, way in enumerate(meshes):
        await meshes[way].take_turn(jobs(-1 - number, max(AT_ONCE, size // 2)))
    taken: list[tuple[Way, Turn]] = []
    order = [way for on in ON for way in (OFF, on)] * rounds + [OFF]
    for number, way in enumerate(order):
        taken.append((way, await meshes[way].take_turn(jobs(number, size))))
        say(f"turn {number + 1}/{len(order)}  {way.name}: {taken[-1][1].tokens_per_s:.1f} tokens/s")
    return taken


def _throughput_figures(taken: Taken) -> list[Figure]:
    off = median(turn.tokens_per_s for way, turn in taken if way is OFF)
    work = f"SmolLM2-135M, one router, one prefill and one decode worker, {AT_ONCE} requests at a time"
    found = _compared(taken, lambda turn: turn.tokens_per_s)
    return [
        Figure("output tokens per second, off", round(off, 1), "tokens/s", "higher", peer=work),
        *(_ratio_figure("throughput", way, found[way], "higher", GOAL if way in (TRACES, ALL) else None) for way in (OFF, *ON)),
    ]


def _cpu_figures(taken: Taken, scraper_name: str) -> list[Figure]:
    """All processes of a mesh, and whoever takes what it tells, together; then each kind."""
    found = _compared(taken, lambda turn: turn.cpu_ms(""))
    return [
        *(_ratio_figure("CPU time per request", way, found[way], "lower") for way in (OFF, *ON)),
        *(_each_figure([turn for each, turn in taken if each is way], way, scraper_name) for way in (OFF, *ON)),
    ]


def _ratio_figure(
    name: str, way: Way, found: Sequence[float], better: Literal["higher", "lower"], goal: float | None = None
) -> Figure:
    return Figure(f"{name}, {way.name} ÷ off", round(median(found), 4), "ratio", better, goal=goal, peer=spread(found))


def _each_figure(turns: Sequence[Turn], way: Way, scraper_name: str) -> Figure:
    each = {kind: median(turn.cpu_ms(kind) for turn in turns) for kind in KINDS}
    told = ", ".join(f"{scraper_name if kind == 'scraper' else kind} {ms:.2f}" for kind, ms in each.items() if ms)
    whole = median(turn.cpu_ms("") for turn in turns)
    return Figure(f"CPU time per request, {way.name}", round(whole, 2), "ms", "lower", peer=told)


def _compared(taken: Taken, value: Callable[[Turn], float]) -> dict[Way, list[float]]:
    found = ratios([(way.name, value(turn)) for way, turn in taken], OFF.name)
    return {way: found[way.name] for way in (OFF, *ON)}


async def _idle_figure(side: Side) -> Figure:
    """That the meshes which wait for their turn take nothing worth speaking of from the one that works."""
    pids = side.mesh.pids.values()
    before = sum(map(process_cpu_ns, pids))
    await asyncio.sleep(IDLE_S)
    cores = (sum(map(process_cpu_ns, pids)) - before) / 1e9 / IDLE_S
    return Figure(f"a mesh without work, {side.way.name}", round(100 * cores, 2), "% of a core", "lower")
