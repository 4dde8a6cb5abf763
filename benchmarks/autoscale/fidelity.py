"""The simulator against a real mesh: the same requests at the same times, TTFT and TPOT side by side.

Real processes on this machine's cores, router, load and Redis beside the engines. First some requests that calibrate what the
simulator cannot know (`fidelity_runs.py`); then a slice of the trace, twice: how far apart two equal runs are is as near
as any simulation can be expected to come. Workers are simulated as they reported themselves to be. Observations are kept:
`python -m benchmarks.autoscale.fidelity [separated] [mesh]` simulates them again, and shows where the time went.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.autoscale import fidelity_real
from benchmarks.autoscale.fidelity_runs import (
    INPUT_SCALE,
    OUTPUT_SCALE,
    PARTS,
    Calibration,
    Passage,
    Run,
    arrivals_of,
    calibrated,
)
from benchmarks.autoscale.scenario import Options
from benchmarks.harness import Figure, Kept, say
from benchmarks.router.meshes import MESH, SEPARATED, Running, Shape
from pdmesh.loadtest.stats import quantile
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.mesh import Mesh
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.routers.routing import MODEL
from pdmesh.simulator.settings import MeshSettings
from router.flow_control.capacity import AdmissionSettings

# Two runs of the same requests side by side: quantiles, how far apart they are, and in which part of the time. Pure.


class Quantity(NamedTuple):
    """What is compared, and how far apart a simulation may be: a share."""

    name: str
    field: str
    q: float
    goal: float


QUANTITIES = (
    Quantity("TTFT median", "ttft_s", 0.5, 0.10),
    Quantity("TPOT median", "tpot_s", 0.5, 0.10),
    Quantity("TTFT p99", "ttft_s", 0.99, 0.25),
    Quantity("TPOT p99", "tpot_s", 0.99, 0.25),
)


def value(runs: Iterable[Run], what: Quantity) -> float:
    """Of the requests of all these runs together, in seconds. Raises ValueError without any."""
    values = sorted(seconds for run in runs for one in run.passages if (seconds := getattr(one, what.field)) > 0)
    if not values:
        raise ValueError(f"{what.name}: no request was answered")
    return quantile(values, what.q)


def apart(ours: float, theirs: float) -> float:
    """|ours / theirs - 1|."""
    return abs(ours / theirs - 1)


def lines(real: Sequence[Run], simulated: Sequence[Run]) -> list[str]:
    """A table for people: milliseconds, real and simulated."""
    listed = [f"{'':<20}{'real':>9}{'simulated':>11}{'off':>8}"]
    for what in QUANTITIES:
        theirs, ours = value(real, what), value(simulated, what)
        listed.append(f"{what.name:<20}{1e3 * theirs:9.2f}{1e3 * ours:11.2f}{ours / theirs - 1:+8.1%}")
    listed.append(f"{'LOCAL':<20}{_local(real):9.1%}{_local(simulated):11.1%}")
    listed.append(f"{'refused':<20}{_refused(real):9.1f}{_refused(simulated):11.1f}")
    listed.append(f"{'':<20}{'mean':>9}{'p50':>9}{'p99':>9}   |{'mean':>9}{'p50':>9}{'p99':>9}")
    for part in ("outside", *PARTS, "first_gap"):
        theirs_of, ours_of = _three(real, part), _three(simulated, part)
        listed.append(f"{part:<20}{theirs_of}   |{ours_of}")
    return listed


def _three(runs: Sequence[Run], part: str) -> str:
    values = sorted(one.parts.get(part, 0.0) for one in _passages(runs))
    three = (sum(values) / len(values), quantile(values, 0.5), quantile(values, 0.99))
    return "".join(f"{1e3 * seconds:9.2f}" for seconds in three)


def _local(runs: Sequence[Run]) -> float:
    passages = _passages(runs)
    return sum(one.is_local for one in passages) / len(passages)


def _refused(runs: Sequence[Run]) -> float:
    return sum(run.num_refused for run in runs) / len(runs)


def _passages(runs: Sequence[Run]) -> list[Passage]:
    return [one for run in runs for one in run.passages]


# The same requests through a simulated mesh: what each took there.


@dataclass
class Audience:
    """Keeps what became of those that count."""

    from_s: float
    router_s: float
    passages: list[Passage] = field(default_factory=list)
    num_refused: int = 0

    def arrived(self, request: Request) -> None:
        """Nothing is known yet."""

    def ended(self, request: Request, end: End, now: float) -> None:
        """As `pdmesh.simulator.mesh.Audience` says. Raises ValueError for one that was lost: nobody dies here."""
        if request.arrival.at_s < self.from_s:
            return
        if end is End.LOST:
            raise ValueError(f"request {request.number} was lost: {request.reason}")
        self.num_refused += end is End.REFUSED
        if end is End.COMPLETED:
            self.passages.append(_passage(request, self.router_s))


def simulated(run: Run, settings: MeshSettings, measured: Calibration, seeds: Iterable[int]) -> list[Run]:
    """The run's arrivals on its workers, as they said they were; once for each seed, which draws what is left to chance."""
    return [_simulated(run, settings, measured, seed) for seed in seeds]


def objective(ttft_ms: int, tpot_ms: int) -> ModelObjective:
    """Of the simulated model."""
    return ModelObjective(MODEL, ttft_ms, tpot_ms, 0.99)


def _simulated(run: Run, settings: MeshSettings, measured: Calibration, seed: int) -> Run:
    audience = Audience(run.from_s, settings.router_s)
    mesh = Mesh(settings, audience, prefix_tokens=0, seed=seed)
    for worker in run.workers:
        spec = worker.spec(between_s=measured.between_s, noise=measured.noise, noise_lasts_s=measured.noise_lasts_s)
        mesh.add_worker(spec, prefill=worker.prefill, decode=worker.decode, name=worker.name)
    mesh.run(Arrival(*one) for one in run.arrivals)
    return Run(run.arrivals, run.from_s, audience.passages, audience.num_refused)


def _passage(request: Request, router_s: float) -> Passage:
    trail, at_s = request.trail, request.arrival.at_s
    assert trail is not None and request.ttft_s is not None, "it was answered"
    reserve_s = trail.placed_at - trail.decided_at
    queue_s = trail.computed_at - trail.compute_s - trail.placed_at
    queued_s = trail.decided_at - at_s - router_s
    parts = {
        "route": router_s,
        "admission_queue": queued_s,
        "reserve": reserve_s,
        "prefill_queue": queue_s,
        "prefill_compute": trail.compute_s,
        "first_token_return": request.ttft_s - router_s - queued_s - reserve_s - queue_s - trail.compute_s,
        "kv_exposed": 0.0 if request.is_local else trail.after_s,
    }
    return Passage(at_s, request.num_input, request.num_output, request.ttft_s, request.tpot_s or 0.0, request.is_local, parts)


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
