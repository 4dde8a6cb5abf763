"""Pods that take minutes to start, as those with a GPU do: what the autoscaler keeps and costs on the public traces where a pod
serves 60, 180 and 600 s after it is asked for, beside Kubernetes' own on queue length.

The oracle of `simulated.py` is not searched for each: that takes a quarter of an hour for one. Costs are over those of 60 s.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from benchmarks.autoscale.oracle import demands
from benchmarks.autoscale.runs import START_S, Outcome, hpa_queue, own, play
from benchmarks.autoscale.scenario import PUBLISHED, SCENARIOS, Options, quick
from benchmarks.autoscale.simulated import NUM_PROCESSES, OURS, first_pods
from benchmarks.harness import Figure, say
from pdmesh.simulator import compiled

STARTS_S = (START_S, 180.0, 600.0)
HPA = "Kubernetes HPA on queue length (5 each)"
LEAST_ATTAINMENT = 0.98

Run = tuple[int, float, str]
"""Number of a scenario, seconds of a start, whose decisions."""


def figures(options: Options) -> list[Figure]:
    """Of all traces."""
    runs: list[Run] = list(product(range(len(SCENARIOS)), STARTS_S, (OURS, HPA)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context, initializer=compiled.use) as pool:
        found = dict(zip(runs, pool.map(_outcome, runs, [options] * len(runs)), strict=True))
    return [figure for number in range(len(SCENARIOS)) for figure in _figures(number, found, options.traces)]


def _outcome(run: Run, options: Options) -> tuple[float, float, int]:
    """Share of requests that kept their objectives, pod-seconds, reversals."""
    number, start_s, whose = run
    scenario = quick(SCENARIOS[number]) if options.quick else SCENARIOS[number]
    arrivals = scenario.arrivals(options.traces)
    scaler = own(scenario, start_s) if whose == OURS else hpa_queue(scenario)
    outcome: Outcome = play(scenario, arrivals, scaler, first_pods(demands(scenario, arrivals)), start_s)
    say(
        f"{scenario.name}, starts of {start_s:g} s: {whose}: {outcome.attainment:.2%} kept, {outcome.pod_seconds:.0f} pod-seconds"
    )
    return outcome.attainment, outcome.pod_seconds, outcome.num_reversals


def _figures(number: int, found: dict[Run, tuple[float, float, int]], traces: Path | None) -> list[Figure]:
    name = SCENARIOS[number].name
    is_generated = traces is None or not (traces / PUBLISHED[name][0]).is_file()
    _, usual, _ = found[number, START_S, OURS]
    figures = list[Figure]()
    for start_s in STARTS_S:
        label = f"{name}{' (generated lengths)' if is_generated else ''}, starts of {start_s:g} s"
        attainment, pod_seconds, reversals = found[number, start_s, OURS]
        others, their_pod_seconds, _ = found[number, start_s, HPA]
        figures += [
            Figure(f"{label}: requests that kept their objectives", attainment, "share", "higher", goal=LEAST_ATTAINMENT),
            Figure(f"{label}: pod-seconds over those with starts of {START_S:g} s", pod_seconds / usual, "times", "lower"),
            Figure(f"{label}: reversals within a cool-down", reversals, "changes", "lower"),
            Figure(f"{label}: {HPA}: requests that kept their objectives", others, "share", "higher", peer=HPA),
            Figure(f"{label}: {HPA}: pod-seconds over ours", their_pod_seconds / pod_seconds, "times", "higher", peer=HPA),
        ]
    return figures
