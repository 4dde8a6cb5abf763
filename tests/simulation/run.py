"""Runs seeds in child processes: python -m tests.simulation.run --seeds 1-1000, or --seed 17 --log, or --seed 17 --shrink.

`make test` runs --today: seeds that no other day runs, for so many --seconds.

A seed replays to the same event wherever it runs: hashes of texts are fixed (PYTHONHASHSEED), and each run begins in a copy of
the same fresh process.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime

from tests.simulation import machine
from tests.simulation.profiles import scenario
from tests.simulation.runs import BATCH, Case, Ran, children_cpu_s, outcomes, run_alone
from tests.simulation.shrinking.reduction import add_options, reduction_of
from tests.simulation.shrinking.shrink import MAX_RUNS, shrunk

FIRST_DAY, FIRST_OF_DAYS, SEEDS_OF_DAY = date(2026, 1, 1), 10_000_001, 10_000


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    with_fixed_hashes("tests.simulation.run", arguments)
    prepare(options.mutant)
    if options.seed is not None:
        return _show(Case(options.seed, reduction_of(options)), log=options.log, shrink=options.shrink, mutant=options.mutant)
    num_bad, virtual_s, num = 0, 0.0, 0
    cases = (Case(seed, reduction_of(options)) for seed in _seeds(options))
    for ran in outcomes(cases, num_children=options.children, batch=options.batch):
        num += 1
        virtual_s += ran.virtual_s
        num_bad += bool(ran.violations)
        _tell(ran, as_json=options.json)
        if ran.violations and options.stop:
            print(f"found after {num} seeds")
            break
    cpu_s = children_cpu_s()
    speed = f"{virtual_s / max(cpu_s, 1e-9):.1f} s in 1 s of CPU, {cpu_s / max(1, num) * 1e3:.0f} ms of CPU a seed"
    print(f"{num} seeds, {num_bad} with violations, {speed}")
    return int(num_bad > 0)


def _seeds(options: argparse.Namespace) -> Iterator[int]:
    """Yield the seeds that the options name, until the time is over."""
    now = machine.real("monotonic")
    ends_at = now() + options.seconds
    first, _, last = options.seeds.partition("-")
    chosen = range(int(first), int(last or first) + 1)
    for seed in seeds_of(datetime.now(UTC).date()) if options.today else chosen:
        if now() >= ends_at:
            return
        if not options.profile or scenario(seed).profile == options.profile:
            yield seed


def seeds_of(day: date) -> range:
    """Return the seeds of a day: those of `make simulate`, from 1, are none of them."""
    first = FIRST_OF_DAYS + (day - FIRST_DAY).days * SEEDS_OF_DAY
    return range(first, first + SEEDS_OF_DAY)


def with_fixed_hashes(module: str, arguments: list[str]) -> None:
    """Begin the program again where hashes of texts are not the same in each process."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execvpe(sys.executable, [sys.executable, "-m", module, *arguments], {**os.environ, "PYTHONHASHSEED": "0"})


def prepare(mutant: str = "") -> None:
    """Replace the machine, import, and make what all runs share."""
    machine.install()
    import torch

    torch.set_num_threads(1)
    from kvtransfer.native.library import prepare as prepare_native
    from tests.simulation import simulate  # noqa: F401
    from tests.simulation.mesh import model_folder

    prepare_native()
    model_folder()
    if mutant:
        from tests.simulation.mutants import MUTANTS

        MUTANTS[mutant]()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()


def _tell(ran: Ran, *, as_json: bool) -> None:
    if as_json:
        shown = {"violations": ran.violations, "digest": ran.digest, "num_events": ran.num_events, "virtual_s": ran.virtual_s}
        print(json.dumps({"seed": ran.case.seed, **shown}), flush=True)
    if ran.violations:
        print(f"seed {ran.case.seed}: {ran.violations[0]}"[:400])
        if len(ran.violations) > 1:
            print(f"    and {len(ran.violations) - 1} more")
        print(f"    {ran.case.command}", flush=True)


def _show(case: Case, *, log: bool, shrink: int, mutant: str) -> int:
    if log:
        logging.disable(logging.NOTSET)
        logging.basicConfig(level=logging.INFO, format="%(vnow)s %(name)s %(message)s")
        logging.getLogger().handlers[0].addFilter(_with_time)
    print(case.reduction.of(scenario(case.seed)))
    ran = run_alone(case, log=log)
    for line in ran.log:
        print(line)
    print(f"{ran.num_events} events in {ran.virtual_s:.3f} s, digest {ran.digest}")
    for violation in ran.violations:
        print(violation)
    if shrink and ran.violations:
        small, num_runs = shrunk(ran, shrink)
        print(f"after {num_runs} runs: {small.violations[0]}")
        print(f"    {small.case.command}{f' --mutant {mutant}' if mutant else ''}")
    return int(bool(ran.violations))


def _with_time(record: logging.LogRecord) -> bool:
    from tests.simulation.world import current_process

    process = current_process()
    record.vnow = "" if process is None else f"{process.world.now_ns / 1e9:.4f} {process.name}"
    return True


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run")
    parser.add_argument("--seed", type=int, help="one seed, with its scenario")
    parser.add_argument("--seeds", default="1-100", help="the first and the last")
    parser.add_argument("--today", action="store_true", help="the seeds of this day (UTC), in place of --seeds")
    parser.add_argument("--profile", default="", help="only seeds that are about it, by its name in profiles.py")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after that time")
    parser.add_argument("--mutant", default="", help="a bug that is put in, by its name in mutants.py")
    parser.add_argument("--stop", action="store_true", help="end at the first seed with a violation")
    parser.add_argument("--shrink", type=int, nargs="?", const=MAX_RUNS, default=0, help="runs to make a failing --seed small")
    parser.add_argument("--children", type=int, default=1, help="processes that run at a time")
    parser.add_argument("--batch", type=int, default=BATCH, help="seeds that a process runs, one after the other")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each seed")
    parser.add_argument("--log", action="store_true", help="print what happens in --seed")
    add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
