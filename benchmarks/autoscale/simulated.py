"""What the autoscaler keeps and costs in simulation, beside an oracle and what others do, on the public traces.

The traces lie outside of the repository (`--traces`); without one, generated lengths stand in for it, and the figure says so.
Every run of a trace is the same requests through the same simulated routers and workers; pods take 60 s to start.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.autoscale import oracle
from benchmarks.autoscale.contest import COOL_DOWN_S, POOLS, WINDOW_S, Outcome, dynamo, fixed, hpa_cpu, hpa_queue, own, play
from benchmarks.autoscale.options import Options
from benchmarks.autoscale.scenario import PUBLISHED, SCENARIOS, Scenario, quick
from benchmarks.harness import Figure, say
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
LEAST_ATTAINMENT, MOST_COST = 0.96, 1.15
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
        found = pool.map(_of_load, range(len(SCENARIOS)), [options] * len(SCENARIOS))
        return [figure for figures in found for figure in figures]


def _of_load(number: int, options: Options) -> list[Figure]:
    """In a process that may use what is compiled: of that nothing pickles, so a number comes and figures go."""
    scenario = quick(SCENARIOS[number]) if options.quick else SCENARIOS[number]
    each = contest(scenario, options.traces)
    _write(each, options.report)
    return _figures(each)


def contest(scenario: Scenario, traces: Path | None) -> Contest:
    """Runs them all on one load."""
    arrivals = scenario.arrivals(traces)
    loads = oracle.demands(scenario, arrivals)
    start = {pool: max(2, math.ceil(1.5 * max(loads[pool][:3]))) for pool in POOLS}
    outcomes = {OURS: play(scenario, arrivals, own(scenario), start)}
    _tell(scenario, OURS, outcomes[OURS])
    for name, scaler in RIVALS.items():
        outcomes[name] = play(scenario, arrivals, scaler(scenario), start)
        _tell(scenario, name, outcomes[name])
    pool_of_same_cost = _same_cost(outcomes[OURS])
    outcomes[FIXED] = play(scenario, arrivals, fixed(pool_of_same_cost), pool_of_same_cost)
    _tell(scenario, FIXED, outcomes[FIXED])
    found = _search(scenario, arrivals, loads, outcomes[OURS])
    outcomes[ORACLE] = found.outcome
    _tell(scenario, f"{ORACLE} ({found.num_runs} runs)", found.outcome)
    is_generated = traces is None or not (traces / PUBLISHED[scenario.name][0]).is_file()
    return Contest(scenario, is_generated, outcomes, found.num_runs)


def _search(scenario: Scenario, arrivals: list[Arrival], loads: dict[PoolName, list[float]], ours: Outcome) -> oracle.Found:
    def evaluate(schedule: oracle.Schedule) -> Outcome:
        start = {pool: max(oracle.at(row, 0.0), oracle.at(row, WINDOW_S)) for pool, row in schedule.items()}
        return play(scenario, arrivals, oracle.Scheduled(schedule), start)

    return oracle.search(loads, oracle.served(ours), evaluate, ours.attainment)


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
    found = [
        Figure(f"{load}: requests that kept their objectives", ours.attainment, "share", "higher", goal=LEAST_ATTAINMENT),
        Figure(f"{load}: pod-seconds over an oracle's", ours.pod_seconds / best.pod_seconds, "times", "lower", goal=MOST_COST),
        Figure(f"{load}: reversals within a cool-down", ours.num_reversals, "changes", "lower", goal=0),
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
