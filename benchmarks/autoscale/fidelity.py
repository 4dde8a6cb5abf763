"""The simulator against a real mesh: the same requests at the same times, TTFT and TPOT side by side.

Real processes on this machine's cores, the routers, the load and Redis beside the engines. First some requests that calibrate what the
simulator cannot know (`fidelity_calibration.py`); then a slice of the trace, twice: how far apart two equal runs are is as near
as any simulation can be expected to come. Workers are simulated as they reported themselves to be. Observations are kept:
`python -m benchmarks.autoscale.fidelity` simulates them again, and shows where the time went.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from benchmarks.autoscale import fidelity_real
from benchmarks.autoscale.fidelity_runs import Run, arrivals_of
from benchmarks.autoscale.fidelity_sim import objective, simulated
from benchmarks.autoscale.fidelity_table import QUANTITIES, apart, lines, value
from benchmarks.autoscale.options import Options
from benchmarks.harness import Figure, say
from benchmarks.router.meshes import MESH, SEPARATED, Running, Shape
from benchmarks.router.options import Kept
from router.places import AdmissionSettings
from simulator.settings import MeshSettings
from simulator.traces import Arrival

SHAPES = (SEPARATED, MESH)
LOAD = 0.6
"""Of the capacity."""
CONCURRENCY = 8
CALIBRATION_S, COUNTED_S, WARMUP_S = 30.0, 60.0, 8.0
STARTS = (2000, 8000)
"""Rows of the trace: of the calibration, and of what is compared."""
SEEDS = range(8)
RUNS = ("first", "second")


async def observe(shape: Shape, options: Options, kept: Kept) -> None:
    """Keeps the runs of one mesh."""
    async with fidelity_real.started(shape, options) as system:
        rate = LOAD * await _capacity(system, options)
        say(f"{shape.name}: {rate:.3g} requests/s")
        kept.put(f"{shape.key}-alone", (await fidelity_real.run(system, _alone(), 0.0, 700, options)).to_keep())
        for number, name in enumerate(("calibration", *RUNS), 1):
            seconds = options.pick(CALIBRATION_S if name == "calibration" else COUNTED_S, 4.0) + options.pick(WARMUP_S, 1.0)
            arrivals = arrivals_of(options.traces, STARTS[number > 1], rate, seconds, STARTS[number > 1])
            run = await fidelity_real.run(system, arrivals, options.pick(WARMUP_S, 1.0), 700 + number, options)
            kept.put(f"{shape.key}-{name}", run.to_keep())


def _alone() -> list[Arrival]:
    """Nobody meets another."""
    return [Arrival(1.5 * number, num_input, 40) for number, num_input in enumerate((16, 64, 64, 128, 64, 16, 128, 64))]


async def _capacity(system: Running, options: Options) -> float:
    """Requests a second that keep it busy, once it is warm."""
    some = arrivals_of(options.traces, STARTS[0], 1.0, 64.0, STARTS[0])
    lengths = [(one.num_input, one.num_output) for one in some]
    await fidelity_real.capacity(system, lengths, CONCURRENCY, options.pick(5.0, 2.0), seed=698)
    return await fidelity_real.capacity(system, lengths, CONCURRENCY, options.pick(9.0, 2.0), seed=699)


def settings() -> MeshSettings:
    """As the real mesh's."""
    return MeshSettings(
        admission=AdmissionSettings(), objective=objective(fidelity_real.TTFT_MS, fidelity_real.TPOT_MS), max_tokens=1
    )


def compared(shape: Shape, kept: Kept) -> list[Figure]:
    """Of one mesh's kept runs."""
    real = [Run.of(kept.get(f"{shape.key}-{name}")) for name in RUNS]
    ours = [one for run in real for one in simulated(run, settings(), SEEDS)]
    say("\n".join([f"{shape.name}:", *lines(real, ours)]))
    listed = []
    for what in QUANTITIES:
        theirs = value(real, what)
        name = f"{shape.name}: {what.name}"
        listed += [
            Figure(f"{name}: |simulated / real - 1|", apart(value(ours, what), theirs), "share", "lower", what.goal),
            Figure(f"{name}: between two equal real runs", apart(value(real[:1], what), value(real[1:], what)), "share", "lower"),
            Figure(f"{name}: real", 1e3 * theirs, "ms", "lower"),
        ]
    return listed


async def figures(options: Options) -> list[Figure]:
    """Of all meshes."""
    kept = Kept(options.folder / "fidelity")
    for shape in SHAPES:
        await observe(shape, options, kept)
    return [figure for shape in SHAPES for figure in compared(shape, kept)]


def main() -> None:
    """Shows what is kept, after observing the meshes that are named."""
    options = Options(traces=Path(folder) if (folder := os.environ.get("PDMESH_TRACES")) else None)
    kept = Kept(options.folder / "fidelity")
    for shape in SHAPES:
        if shape.key in sys.argv[1:]:
            asyncio.run(observe(shape, options, kept))
        compared(shape, kept)


if __name__ == "__main__":
    main()
