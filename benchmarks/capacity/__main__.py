"""`make bench-capacity`: the highest rate at which 90 % of requests keep their objectives: mesh, one engine, vLLM, SMG with vLLM.

Everybody gets both cores, one after the other. First each is searched, then, in a second round, each is asked again at what was
found and at 1.15 times that. What was measured is kept until all of it is written, so a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.capacity.probes import (
    ABOVE,
    FULL,
    MAX_INPUT_TOKENS,
    OUTPUT_TOKENS,
    QUICK,
    TRAFFIC,
    Plan,
    Probes,
    ask_alone,
    objectives_for,
)
from benchmarks.harness import MODEL, RESULTS, Figure, cancellable, parser_of, say, show, this_machine, write
from benchmarks.peers.environments import PeerError
from benchmarks.peers.servers import watched_shared_memory
from benchmarks.peers.systems import SYSTEMS, System
from benchmarks.router.mixes import RULE
from pdmesh.loadtest import result as loadtest_result
from pdmesh.loadtest.measure import Capacity, Trial, found, search_capacity, trial_of, window_at
from pdmesh.loadtest.record import Objectives
from pdmesh.loadtest.reports import comparison, text
from pdmesh.loadtest.reports.comparison import Facts
from pdmesh.loadtest.result import Result
from pdmesh.models.catalogue import ModelError, cache_folder

# What was found, as figures and as a page.


# What was asked of the mesh: times its peer's capacity.
GOALS = {"two-engines": 0.98, "aggregated": 0.98, "vllm": 2.0, "smg": 2.0}


@dataclass(frozen=True)
class Outcome:
    """One system: all its windows, and the one that shows how it answers at its capacity (where it has none: the last one)."""

    system: System
    plan: Plan
    trials: Sequence[Trial]
    shown: Result
    num_stuck: int = 0

    @property
    def capacity(self) -> Capacity:
        """The highest rate that held in the second round, too, below those that failed; without one, the highest that held."""
        search = self.plan.search
        known = found(search, self.trials)
        counts = Counter(trial.rate for trial in self.trials)
        sure = [rate for rate, number in counts.items() if number > search.windows and rate <= (known.rate or 0.0)]
        held = [rate for rate in sure if search.holds(rate, self.trials)]
        if not held:
            return known
        return replace(found(search, [trial for trial in self.trials if trial.rate <= max(held)]), failed_rate=known.failed_rate)

    @property
    def confirmed(self) -> bool:
        """Whether the capacity held in windows of the second round, too."""
        return sum(trial.rate == self.capacity.rate for trial in self.trials) > self.plan.search.windows

    @property
    def strict(self) -> Capacity:
        """Of 99 %, as far as the same windows tell it."""
        return found(self.plan.strict_search, self.trials)

    @property
    def shown_at(self) -> str:
        """Where the shown window was measured."""
        attainment = self.shown.summary.attainment or 0.0
        rate = next((trial.rate for trial in reversed(self.trials) if trial.attainment == attainment), None)
        if rate is None or rate == self.capacity.rate:
            return "at its capacity" if self.capacity.rate else "at the lowest rate that was tried"
        return f"at {rate:g} requests/s" if self.capacity.rate else "at the lowest rate that was tried"

    @property
    def result(self) -> Result:
        """As `pdmesh loadtest --find-capacity` would have written it."""
        capacities = [capacity.as_json() for capacity in (self.strict, self.capacity)]
        trials = [asdict(trial) for trial in self.trials]
        return replace(self.shown, target=self.system.name, capacity={"capacities": capacities, "trials": trials})


def figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """A capacity that was not found counts as 0: not even the lowest rate that was tried held."""
    listed = [figure for outcome in outcomes for figure in _of_one(outcome)]
    return [*listed, *_ratios({outcome.system.key: outcome for outcome in outcomes})]


def _of_one(outcome: Outcome) -> list[Figure]:
    name, summary = outcome.system.name, outcome.shown.summary
    capacity = "capacity" if outcome.confirmed or not outcome.capacity.rate else "capacity (not confirmed)"
    latencies = {
        f"{metric} {quantile} {outcome.shown_at}": getattr(latency, quantile) if latency.num_values else "none answered"
        for metric, latency in (("TTFT", summary.ttft), ("TPOT", summary.tpot))
        for quantile in ("p50", "p99")
    }
    return [
        Figure(f"{name}: {capacity}, 90 % keep their objectives", outcome.capacity.rate or 0.0, "requests/s", "higher"),
        Figure(f"{name}: capacity, 99 % keep their objectives (at least)", outcome.strict.rate or 0.0, "requests/s", "higher"),
        Figure(f"{name}: goodput at its capacity", outcome.capacity.goodput or 0.0, "requests/s", "higher"),
        *(Figure(f"{name}: {metric}", value, "ms", "lower") for metric, value in latencies.items()),
        Figure(f"{name}: times that it was stuck after a window", outcome.num_stuck, "times", "lower"),
    ]


def _ratios(by_key: Mapping[str, Outcome]) -> list[Figure]:
    ours = by_key.get("mesh")
    if ours is None:
        return []
    ratios = []
    for key, goal in GOALS.items():
        if (peer := by_key.get(key)) is not None:
            theirs, rate = peer.capacity.rate, ours.capacity.rate or 0.0
            value = rate / theirs if theirs else f"{rate:.3g} requests/s against none"
            name = f"{ours.system.name} over {peer.system.name}: capacity"
            ratios.append(Figure(name, value, "times", "higher", goal=goal, peer=peer.system.name))
    return ratios


def page(outcomes: Sequence[Outcome], absent: Mapping[str, str], command: str) -> str:
    """The report."""
    machine = asdict(this_machine())
    late = [(o.system.name, f"{o.shown.lateness.p50:.1f}", f"{o.shown.lateness.p99:.1f}", str(o.num_stuck)) for o in outcomes]
    plan = outcomes[0].plan
    asked = [
        ("prompts", f"{TRAFFIC.input_tokens} tokens, at most {MAX_INPUT_TOKENS}; words, no two prompts alike"),
        ("answers", f"{OUTPUT_TOKENS} tokens, greedy, end of sequence ignored"),
        ("objectives", f"{plan.objectives}; where one request alone takes more than half of 500 and 40 ms: {RULE}"),
        ("arrivals", "Poisson; at equal rates the same times and prompts for everybody"),
        (
            "a window",
            f"{plan.warmup_s:g} s that do not count, then {plan.duration_s:g} s; then what can still be good",
        ),
        ("confirmed by", "further windows at the capacity, whose latencies are shown, and at 1.15 times it, in a second round"),
        ("99 %", "only what these windows tell: that search was not made"),
        ("command", command),
    ]
    facts = [
        *([Facts("Could not take part", list(absent.items()))] if absent else []),
        Facts("What was asked", asked),
        Facts("The systems", [(o.system.name, o.system.about, o.system.command) for o in outcomes]),
        Facts("The load test itself", late, ("", "sent late by p50, ms", "p99, ms", "times the system was stuck after a window")),
        Facts("The machine", [(name, str(value)) for name, value in machine.items()]),
    ]
    results = {outcome.system.name: outcome.result for outcome in outcomes}
    return comparison.page(results, f"Capacity of {len(results)} systems on one machine", facts)


PAGE = RESULTS.parent.parent / "docs" / "reports" / "capacity.html"


async def search(system: System, plan: Plan, folder: Path) -> Outcome:
    """Finds the capacity of one system. PeerError says why it cannot take part."""
    async with Probes(system, folder) as probes:
        found = await search_capacity(
            probes.run,
            plan.measurement(system.name, MODEL),
            (plan.search,),
            lambda trial: say(f"{system.name}: {text.trial_line(trial)}"),
        )
        if found.interrupted:
            raise asyncio.CancelledError
        return Outcome(system, plan, found.trials, found.result, probes.num_stuck)


async def confirm(outcome: Outcome, folder: Path) -> Outcome:
    """A further window at the capacity; where it fails, that was none, and the next lower rate that held is asked again. Then one
    above. The last one at the capacity is what is shown of the system."""
    async with Probes(outcome.system, folder) as probes:
        while (rate := outcome.capacity.rate) is not None and not outcome.confirmed:
            outcome = await _again(outcome, probes, rate, show=True)
        if rate is not None:
            outcome = await _again(outcome, probes, ABOVE * rate, show=False)
        return replace(outcome, num_stuck=outcome.num_stuck + probes.num_stuck)


async def _again(outcome: Outcome, probes: Probes, rate: float, *, show: bool) -> Outcome:
    number = sum(trial.rate == rate for trial in outcome.trials)
    measured = await probes.run(window_at(outcome.plan.measurement(outcome.system.name, MODEL), rate, number))
    if measured.interrupted:
        raise asyncio.CancelledError
    trial = trial_of(rate, measured)
    say(f"{outcome.system.name}: asked again: {text.trial_line(trial)}")
    return replace(outcome, trials=(*outcome.trials, trial), shown=measured if show else outcome.shown)


async def measure_all(systems: Sequence[System], plan: Plan, folder: Path) -> tuple[list[Outcome], dict[str, str]]:
    """Who took part, and why others did not."""
    outcomes, absent = [], {}
    for system in systems:
        try:
            outcomes.append(await search(system, plan, folder))
        except (PeerError, ModelError, OSError) as error:
            absent[system.name] = str(error)
            say(f"{system.name}: could not take part: {error}")
    confirmed = []
    for outcome in outcomes:
        try:
            confirmed.append(await confirm(outcome, folder))
        except (PeerError, ModelError, OSError) as error:
            say(f"{outcome.system.name}: not confirmed: {error}")
            confirmed.append(outcome)
    return confirmed, absent


def report(outcomes: Sequence[Outcome], absent: dict[str, str], folder: Path, *, whole: bool) -> None:
    """Figures and page where the documents point to; what says too little stays in the cache."""
    for outcome in outcomes:
        loadtest_result.write(outcome.result, str(folder / f"{outcome.system.key}.json"))
    where = PAGE if whole else folder / "capacity.html"
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(page(outcomes, absent, "make bench-capacity" if whole else "make bench-capacity, in part"), encoding="utf-8")
    say(f"wrote {where}")
    if not whole:
        show(figures(outcomes))
        return
    windows = {outcome.system.name: [asdict(trial) for trial in outcome.trials] for outcome in outcomes}
    write("capacity", figures(outcomes), model=MODEL, plan=asdict(outcomes[0].plan), windows=windows, absent=absent)


def _kept(path: Path) -> Objectives | None:
    return Objectives(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


async def _asked(plan: Plan, path: Path, *, fresh: bool) -> Plan:
    """Return the plan with objectives that this machine can keep; those of an interrupted run are in a file."""
    kept = None if fresh else _kept(path)
    if kept is None:
        (one_engine,) = (system for system in SYSTEMS if system.key == "aggregated")
        kept = objectives_for(await ask_alone(one_engine))
        path.write_text(json.dumps(asdict(kept)), encoding="utf-8")  # noqa: ASYNC240  once
    say(f"objectives: {kept}")
    return replace(plan, objectives=kept)


async def run(options: argparse.Namespace) -> None:
    folder = cache_folder() / "capacity"
    folder.mkdir(parents=True, exist_ok=True)
    objectives = folder / f"objectives{'-quick' if options.quick else ''}.json"  # a quick run leaves those of an interrupted one
    plan = await _asked(QUICK if options.quick else FULL, objectives, fresh=options.fresh)
    windows = folder / plan.key
    if options.fresh:
        shutil.rmtree(windows, ignore_errors=True)
    if windows.exists():
        say(f"going on with the {len(list(windows.glob('*.json')))} windows that were measured before (--fresh: anew)")
    systems = [system for system in SYSTEMS if not options.only or system.key in options.only.split(",")]
    with watched_shared_memory():
        outcomes, absent = await measure_all(systems, plan, windows)
    if not outcomes:
        raise SystemExit("none of the systems could take part")
    report(outcomes, absent, folder, whole=not options.quick and not options.only)
    shutil.rmtree(windows, ignore_errors=True)
    objectives.unlink(missing_ok=True)


def main() -> None:
    parser = parser_of("benchmarks.capacity", __doc__)
    parser.add_argument("--quick", action="store_true", help="short windows, to see that all work; no results are written")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted run had measured")
    parser.add_argument("--only", default="", help=f"of {','.join(system.key for system in SYSTEMS)}")
    try:
        asyncio.run(cancellable(run(parser.parse_args())))
    except (asyncio.CancelledError, KeyboardInterrupt):
        say("interrupted; the next run goes on with what was measured")
        sys.exit(130)


if __name__ == "__main__":
    main()
