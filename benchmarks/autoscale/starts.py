"""Pods that take minutes to start, as those with a GPU do: what the autoscaler keeps and costs on the public traces where a pod
serves 60, 180 and 600 s after it is asked for, beside Kubernetes' own on queue length; and on three seeds (other places of the
traces) that no parameter was chosen on.

The oracle of `simulated.py` is not searched for each: that takes a quarter of an hour for one. Costs are over those of 60 s, and
of seeds over the bare work: what prompts take, and steps of the largest batch that keeps its objective.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.autoscale.oracle import demands
from benchmarks.autoscale.runs import START_S, WINDOW_S, hpa_queue, own, play
from benchmarks.autoscale.scenario import PUBLISHED, SCENARIOS, Options, quick
from benchmarks.autoscale.simulated import LEAST_OF_CODE, MOST_REVERSALS, NUM_PROCESSES, OURS, first_pods
from benchmarks.harness import Figure, say
from pdmesh.simulator import compiled

STARTS_S = (START_S, 180.0, 600.0)
HPA = "Kubernetes HPA on queue length (5 each)"
SEEDS = (0, 1, 2, 3)
"""The first is that of `simulated.py`."""
LEAST_ATTAINMENT = 0.98


class Run(NamedTuple):
    """Number of a scenario, seconds of a start, whose decisions."""

    number: int
    start_s: float
    whose: str
    seed: int = SEEDS[0]


class Kept(NamedTuple):
    """Share of requests that kept their objectives, pod-seconds, reversals; and the worker-seconds of the bare work."""

    attainment: float
    pod_seconds: float
    num_reversals: int
    work_s: float


def figures(options: Options) -> list[Figure]:
    """Of all traces."""
    numbers = range(len(SCENARIOS))
    runs = [Run(*run) for run in product(numbers, STARTS_S, (OURS, HPA))]
    runs += [Run(number, START_S, OURS, seed) for number, seed in product(numbers, SEEDS[1:])]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context, initializer=compiled.use) as pool:
        found = dict(zip(runs, pool.map(_outcome, runs, [options] * len(runs)), strict=True))
    of_starts = [figure for number in numbers for figure in _of_starts(number, found, options.traces)]
    return of_starts + [figure for number in numbers for figure in _of_seeds(number, found, options.traces)]


def _outcome(run: Run, options: Options) -> Kept:
    scenario = replace(SCENARIOS[run.number], seed=run.seed)
    if options.quick:
        scenario = quick(scenario)
    arrivals = scenario.arrivals(options.traces)
    scaler = own(scenario, run.start_s) if run.whose == OURS else hpa_queue(scenario)
    loads = demands(scenario, arrivals)
    outcome = play(scenario, arrivals, scaler, first_pods(loads), run.start_s)
    say(
        f"{scenario.name}, seed {run.seed}, starts of {run.start_s:g} s: {run.whose}: {outcome.attainment:.2%} kept, "
        f"{outcome.pod_seconds:.0f} pod-seconds, {outcome.num_reversals} reversals"
    )
    work_s = WINDOW_S * sum(sum(row) for row in loads.values())
    return Kept(outcome.attainment, outcome.pod_seconds, outcome.num_reversals, work_s)


def _label(number: int, traces: Path | None) -> str:
    name = SCENARIOS[number].name
    is_generated = traces is None or not (traces / PUBLISHED[name][0]).is_file()
    return f"{name}{' (generated lengths)' if is_generated else ''}"


def _of_starts(number: int, found: dict[Run, Kept], traces: Path | None) -> list[Figure]:
    usual = found[Run(number, START_S, OURS)]
    figures = list[Figure]()
    for start_s in STARTS_S:
        label = f"{_label(number, traces)}, starts of {start_s:g} s"
        ours, others = found[Run(number, start_s, OURS)], found[Run(number, start_s, HPA)]
        over, theirs = ours.pod_seconds / usual.pod_seconds, others.pod_seconds / ours.pod_seconds
        figures += [
            Figure(f"{label}: requests that kept their objectives", ours.attainment, "share", "higher", goal=LEAST_ATTAINMENT),
            Figure(f"{label}: pod-seconds over those with starts of {START_S:g} s", over, "times", "lower"),
            Figure(f"{label}: reversals within a cool-down", ours.num_reversals, "changes", "lower"),
            Figure(f"{label}: {HPA}: requests that kept their objectives", others.attainment, "share", "higher", peer=HPA),
            Figure(f"{label}: {HPA}: pod-seconds over ours", theirs, "times", "higher", peer=HPA),
        ]
    return figures


def _of_seeds(number: int, found: dict[Run, Kept], traces: Path | None) -> list[Figure]:
    least = LEAST_OF_CODE if SCENARIOS[number].name == "azure-code" else LEAST_ATTAINMENT
    figures = list[Figure]()
    for seed in SEEDS:
        label, ours = f"{_label(number, traces)}, seed {seed}", found[Run(number, START_S, OURS, seed)]
        figures += [
            Figure(f"{label}: requests that kept their objectives", ours.attainment, "share", "higher", goal=least),
            Figure(f"{label}: pod-seconds over the bare work", ours.pod_seconds / ours.work_s, "times", "lower"),
            Figure(f"{label}: reversals within a cool-down", ours.num_reversals, "changes", "lower", goal=MOST_REVERSALS),
        ]
    return figures
