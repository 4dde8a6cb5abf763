"""What the autoscaler keeps and costs in simulation, beside an oracle and what others do, on the public traces.

The traces lie outside of the repository (`--traces`); without one, generated lengths stand in for it, and the figure says so.
Every run of a trace is the same requests through the same simulated routers and workers; pods take 60 s to start.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.autoscale.oracle import Judged, Schedule, Scheduled, at, demands, search, served
from benchmarks.autoscale.runs import COOL_DOWN_S, POOLS, WINDOW_S, Outcome, dynamo, fixed, hpa_cpu, hpa_queue, own, play
from benchmarks.autoscale.scenario import PUBLISHED, SCENARIOS, Options, Scenario, quick
from benchmarks.harness import Figure, Kept, say
from pdmesh.autoscaler.views import PoolName
from pdmesh.simulator import compiled
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.autoscaling_page import Shown, page

OURS, ORACLE = "pdmesh", "oracle"
RIVALS = {
    "Kubernetes HPA on CPU (80 %)": hpa_cpu,
    "Kubernetes HPA on queue length (5 each)": hpa_queue,
    "Dynamo's planner (throughput, 180 s, constant prediction)": dynamo,
}
FIXED = "fixed pool of the same cost"
LEAST_ATTAINMENT, LEAST_OF_CODE = 0.98, 0.96
MOST_COST, MOST_REVERSALS = 1.15, 4
NUM_PROCESSES = 2


@dataclass(frozen=True)
class Contest:
    """All runs on one load, by name."""

    scenario: Scenario
    is_generated: bool
    outcomes: Mapping[str, Outcome]
    num_searched: int


def figures(options: Options) -> list[Figure]:
    """Of all loads; writes a page for each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context, initializer=compiled.use) as pool:
        found = list(pool.map(_of_load, range(len(SCENARIOS)), [options] * len(SCENARIOS)))
    Kept(_kept_in(options)).forget()
    return [figure for figures in found for figure in figures]


def _kept_in(options: Options) -> Path:
    """Where an interrupted search for an oracle keeps its runs."""
    return options.folder / "simulated"


def kept_runs(options: Options, scenario: Scenario, arrivals: list[Arrival]) -> Kept:
    """Those of this very load on these very sources: a run without the traces, or of an older policy, says nothing here."""
    load = [(arrival.at_s, arrival.num_input, arrival.num_output) for arrival in arrivals]
    digest = hashlib.sha256(repr((compiled.SIMULATOR.folder.name, scenario, load)).encode()).hexdigest()
    return Kept(_kept_in(options) / digest[:16])


def _of_load(number: int, options: Options) -> list[Figure]:
    """In a process that may use what is compiled: of that nothing pickles, so a number comes and figures go."""
    scenario = quick(SCENARIOS[number]) if options.quick else SCENARIOS[number]
    each = contest(scenario, options)
    _write(each, options.report)
    return _figures(each)


def first_pods(loads: Mapping[PoolName, list[float]]) -> dict[PoolName, int]:
    """Those that serve when a load begins."""
    return {pool: max(2, math.ceil(1.5 * max(loads[pool][:3]))) for pool in POOLS}


def contest(scenario: Scenario, options: Options) -> Contest:
    """Runs them all on one load."""
    traces = options.traces
    arrivals = scenario.arrivals(traces)
    loads = demands(scenario, arrivals)
    start = first_pods(loads)
    outcomes = {OURS: play(scenario, arrivals, own(scenario), start)}
    _tell(scenario, OURS, outcomes[OURS])
    for name, scaler in RIVALS.items():
        outcomes[name] = play(scenario, arrivals, scaler(scenario), start)
        _tell(scenario, name, outcomes[name])
    pool_of_same_cost = _same_cost(outcomes[OURS])
    outcomes[FIXED] = play(scenario, arrivals, fixed(pool_of_same_cost), pool_of_same_cost)
    _tell(scenario, FIXED, outcomes[FIXED])
    outcomes[ORACLE], num_runs = _search(scenario, arrivals, loads, outcomes[OURS], kept_runs(options, scenario, arrivals))
    _tell(scenario, f"{ORACLE} ({num_runs} runs)", outcomes[ORACLE])
    is_generated = traces is None or not (traces / PUBLISHED[scenario.name][0]).is_file()
    return Contest(scenario, is_generated, outcomes, num_runs)


def _search(
    scenario: Scenario, arrivals: list[Arrival], loads: dict[PoolName, list[float]], ours: Outcome, kept: Kept
) -> tuple[Outcome, int]:
    """Return the oracle's run, and how many runs it was found by. What each came to is kept: together they take an hour."""

    def run(schedule: Schedule) -> Outcome:
        start = {pool: max(at(row, 0.0), at(row, WINDOW_S)) for pool, row in schedule.items()}
        return play(scenario, arrivals, Scheduled(schedule), start)

    def evaluate(schedule: Schedule) -> Judged:
        name = hashlib.sha256(repr([schedule[pool] for pool in POOLS]).encode()).hexdigest()[:16]
        if (known := kept.get(name)) is None:
            outcome = run(schedule)
            known = (outcome.attainment, outcome.pod_seconds, outcome.misses)
            kept.put(name, known)
        return Judged(*known)

    found = search(loads, served(ours), evaluate, ours.attainment)
    return run(found.schedule), found.num_runs


def _same_cost(ours: Outcome) -> dict[PoolName, int]:
    """The same pod-seconds at least, divided as ours were."""
    return {pool: max(1, math.ceil(ours.by_pool[pool.value] / ours.ended_s)) for pool in POOLS}


def _tell(scenario: Scenario, name: str, outcome: Outcome) -> None:
    say(
        f"{scenario.name}: {name}: {outcome.attainment:.2%} kept, {outcome.pod_seconds:.0f} pod-seconds, "
        f"{outcome.num_reversals} reversals, {outcome.num_flips} flips"
    )


def _figures(each: Contest) -> list[Figure]:
    load = each.scenario.name + (" (generated lengths)" if each.is_generated else "")
    ours, best = each.outcomes[OURS], each.outcomes[ORACLE]
    least = LEAST_OF_CODE if each.scenario.name == "azure-code" else LEAST_ATTAINMENT
    found = [
        Figure(f"{load}: requests that kept their objectives", ours.attainment, "share", "higher", goal=least),
        Figure(f"{load}: pod-seconds over an oracle's", ours.pod_seconds / best.pod_seconds, "times", "lower", goal=MOST_COST),
        Figure(f"{load}: reversals within a cool-down", ours.num_reversals, "changes", "lower", goal=MOST_REVERSALS),
        Figure(f"{load}: workers that changed roles instead of starting", ours.num_flips, "workers", "higher"),
        Figure(f"{load}: the oracle's share of requests that kept their objectives", best.attainment, "share", "higher"),
    ]
    for name, outcome in each.outcomes.items():
        if name not in (OURS, ORACLE):
            found += _of_rival(f"{load}: {name}", name, outcome, best)
    return found


def _of_rival(label: str, name: str, outcome: Outcome, best: Outcome) -> list[Figure]:
    over = outcome.pod_seconds / best.pod_seconds
    return [
        Figure(f"{label}: requests that kept their objectives", outcome.attainment, "share", "higher", peer=name),
        Figure(f"{label}: pod-seconds over the oracle's", over, "times", "lower", peer=name),
        Figure(f"{label}: reversals within {COOL_DOWN_S:.0f} s", outcome.num_reversals, "changes", "lower", peer=name),
    ]


def _write(each: Contest, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    best = each.outcomes[ORACLE]
    runs = [
        Shown(name, _summary(outcome, best), outcome.moments, outcome.windows, WINDOW_S)
        for name, outcome in each.outcomes.items()
    ]
    path = folder / f"{each.scenario.name}.html"
    path.write_text(page(f"Autoscalers on {each.scenario.name}", runs), encoding="utf-8")
    say(f"wrote {path}")


def _summary(outcome: Outcome, best: Outcome) -> dict[str, str]:
    return {
        "kept their objectives": f"{outcome.attainment:.2%}",
        "pod-seconds": f"{outcome.pod_seconds:.0f}, {outcome.pod_seconds / best.pod_seconds:.3f} of the oracle's",
        f"reversals within {COOL_DOWN_S:.0f} s": str(outcome.num_reversals),
        "workers that changed roles": str(outcome.num_flips),
    }
