"""The simulator against a real mesh: the same requests at the same times, TTFT and TPOT side by side.

Real processes on this machine's cores, router, load and Redis beside the engines. First some requests that calibrate what the
simulator cannot know (`fidelity_calibration.py`); then a slice of the trace, twice: how far apart two equal runs are is as near
as any simulation can be expected to come. Workers are simulated as they reported themselves to be. Observations are kept:
`python -m benchmarks.autoscale.fidelity [separated] [mesh]` simulates them again, and shows where the time went.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.autoscale import fidelity_real
from benchmarks.autoscale.fidelity_calibration import Calibration, calibrated
from benchmarks.autoscale.fidelity_runs import INPUT_SCALE, OUTPUT_SCALE, Run, arrivals_of
from benchmarks.autoscale.fidelity_sim import objective, simulated
from benchmarks.autoscale.fidelity_table import QUANTITIES, apart, lines, value
from benchmarks.autoscale.options import Options
from benchmarks.harness import Figure, say
from benchmarks.router.meshes import MESH, SEPARATED, Running, Shape
from benchmarks.router.options import Kept
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.settings import MeshSettings
from router.flow_control.capacity import AdmissionSettings

SHAPES = (SEPARATED, MESH)
LOAD = 0.6
"""Of the capacity."""
CONCURRENCY = 8
WARMUP_S = 8.0
CALIBRATION_ROW, ROW = 2000, 8000
"""Of the trace, from which on is asked."""
LOADED, COMPARED = "loaded", ("first", "second")
RUNS = ((LOADED, CALIBRATION_ROW, 30.0), (COMPARED[0], ROW, 60.0), (COMPARED[1], ROW, 60.0))
"""Name, row, and seconds that count."""
ALONE = ("local", "remote")
SEEDS = range(8)


async def observe(shape: Shape, options: Options, kept: Kept) -> None:
    """Keeps the runs of one mesh."""
    async with fidelity_real.started(shape, options) as system:
        rate = LOAD * await _capacity(system, options)
        say(f"{shape.name}: {rate:.3g} requests/s")
        for seed, mode in enumerate(ALONE, 697):
            run = await fidelity_real.run(system, _alone(), 0.0, seed, options, mode)
            kept.put(f"{shape.key}-{mode}", run.to_keep())
        for seed, (name, start, counted_s) in enumerate(RUNS, 701):
            warmup_s = options.pick(WARMUP_S, 1.0)
            arrivals = arrivals_of(options.traces, start, rate, options.pick(counted_s, 6.0) + warmup_s, seed=start)
            run = await fidelity_real.run(system, arrivals, warmup_s, seed, options)
            kept.put(f"{shape.key}-{name}", run.to_keep())


def _alone() -> list[Arrival]:
    """Nobody meets another."""
    return [Arrival(1.0 * number, num_input, 24) for number, num_input in enumerate((16, 64, 48, 96, 64))]


async def _capacity(system: Running, options: Options) -> float:
    """Requests a second that keep it busy, once it is warm."""
    some = arrivals_of(options.traces, CALIBRATION_ROW, 1.0, 64.0, CALIBRATION_ROW)
    lengths = [(one.num_input, one.num_output) for one in some]
    await fidelity_real.capacity(system, lengths, CONCURRENCY, options.pick(5.0, 2.0), seed=698)
    return await fidelity_real.capacity(system, lengths, CONCURRENCY, options.pick(9.0, 2.0), seed=699)


def settings(measured: Calibration) -> MeshSettings:
    """As the real mesh's. Clients ask for as many tokens as they get."""
    return MeshSettings(
        admission=AdmissionSettings(),
        objective=objective(fidelity_real.TTFT_MS, fidelity_real.TPOT_MS),
        max_tokens=1,
        router_s=measured.router_s,
        call_s=measured.call_s,
        token_s=measured.token_s,
        handoff=measured.handoff,
    )


def compared(shape: Shape, kept: Kept) -> list[Figure]:
    """Of one mesh's kept runs."""
    runs = {name: _kept(shape, name, kept) for name in (*ALONE, LOADED, *COMPARED)}
    measured = calibrated(*(runs[name] for name in (*ALONE, LOADED)))
    real = [runs[name] for name in COMPARED]
    # As fast as workers said they were in another run, with other requests: whoever simulates a load has not served it yet.
    told = [replace(run, workers=runs[LOADED].workers) for run in real]
    ours = [one for run in told for one in simulated(run, settings(measured), measured, SEEDS)]
    say(f"{shape.name}: {measured}")
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


def _kept(shape: Shape, name: str, kept: Kept) -> Run:
    """Raises ValueError for one that is not there."""
    found = kept.get(f"{shape.key}-{name}")
    if found is None:
        raise ValueError(f"{shape.name}: the {name} run was not observed; name {shape.key} on the command line")
    return Run.of(found)


async def figures(options: Options) -> list[Figure]:
    """Of all meshes. What was observed before an interruption, or by `main`, is not observed again."""
    kept = Kept(options.folder / "fidelity")
    if options.quick:
        kept.forget()
    for shape in SHAPES:
        if kept.get(f"{shape.key}-{COMPARED[-1]}") is None:
            await observe(shape, options, kept)
        else:
            say(f"{shape.name}: as it was observed before")
    listed = [figure for shape in SHAPES for figure in compared(shape, kept)]
    kept.forget()
    return [*listed, Figure("lengths of the trace: prompts, outputs", f"x {INPUT_SCALE:g}, x {OUTPUT_SCALE:g}", "scale", "lower")]


def main() -> None:
    """Observes the meshes that are named, and shows where the time went in all that are kept."""
    folder = os.environ.get("PDMESH_TRACES")
    options = Options(traces=Path(folder) if folder else None)
    kept = Kept(options.folder / "fidelity")
    for shape in SHAPES:
        if shape.key in sys.argv[1:]:
            asyncio.run(observe(shape, options, kept))
        if kept.get(f"{shape.key}-{COMPARED[-1]}") is not None:
            compared(shape, kept)


if __name__ == "__main__":
    main()
