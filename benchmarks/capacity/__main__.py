"""`make bench-capacity`: the highest rate at which 90 % of requests keep their objectives: mesh, one engine, vLLM, SMG with vLLM.

Everybody gets both cores, one after the other. First each is searched, then, in a second round, each is asked again at what was
found and at 1.15 times that. What was measured is kept until all of it is written, so a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.capacity.outcome import Outcome, figures, page
from benchmarks.capacity.plan import ABOVE, FULL, QUICK, Plan
from benchmarks.capacity.probes import Probes
from benchmarks.harness import RESULTS, say, write
from benchmarks.peers.environments import PeerError
from benchmarks.peers.servers import watched_shared_memory
from benchmarks.peers.systems import MODEL, SYSTEMS, System
from pdmesh.loadtest import result as results
from pdmesh.loadtest.measure import search_capacity, trial_of, window_at
from pdmesh.loadtest.reports import text
from pdmesh.models.catalogue import ModelError, cache_folder

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
        results.write(outcome.result, str(folder / f"{outcome.system.key}.json"))
    where = PAGE if whole else folder / "capacity.html"
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(page(outcomes, absent, "make bench-capacity" if whole else "make bench-capacity, in part"), encoding="utf-8")
    say(f"wrote {where}")
    if not whole:
        print("\n".join(json.dumps(asdict(figure)) for figure in figures(outcomes)))
        return
    windows = {outcome.system.name: [asdict(trial) for trial in outcome.trials] for outcome in outcomes}
    write("capacity", figures(outcomes), model=MODEL, plan=asdict(outcomes[0].plan), windows=windows, absent=absent)


async def run(options: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C does: everything that was started is ended.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    plan = QUICK if options.quick else FULL
    folder = cache_folder() / "capacity"
    windows = folder / plan.key
    if options.fresh:
        shutil.rmtree(windows, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if windows.exists():
        say(f"going on with the {len(list(windows.glob('*.json')))} windows that were measured before (--fresh: anew)")
    systems = [system for system in SYSTEMS if not options.only or system.key in options.only.split(",")]
    with watched_shared_memory():
        outcomes, absent = await measure_all(systems, plan, windows)
    if not outcomes:
        raise SystemExit("none of the systems could take part")
    report(outcomes, absent, folder, whole=not options.quick and not options.only)
    shutil.rmtree(windows, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short windows, to see that all work; no results are written")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted run had measured")
    parser.add_argument("--only", default="", help=f"of {','.join(system.key for system in SYSTEMS)}")
    try:
        asyncio.run(run(parser.parse_args()))
    except (asyncio.CancelledError, KeyboardInterrupt):
        say("interrupted; the next run goes on with what was measured")
        sys.exit(130)


if __name__ == "__main__":
    main()
