"""Runs a million seeds once, and each mutant until it is found: make simulate. It goes on where it was interrupted.

    python -m tests.simulation.simulate_all [--num-seeds 1000000] [--children 2] [--seconds 3600]

What is done is in build/simulation.json. A seed counts once, whichever version of the code ran it; one that failed is run again
with the present code, and so is each mutant. The results are written when all is done: benchmarks/results/simulation.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation import machine
from tests.simulation.run import prepare, with_fixed_hashes
from tests.simulation.runs import BATCH, Case, Ran, children_cpu_s, outcomes
from tests.simulation.shrinking.shrink import kind_of, shrunk

ROOT = Path(__file__).parents[2]
STATE = ROOT / "build" / "simulation.json"
PACKAGES = ("router", "pdmesh", "kvtransfer", "prefill_service", "decode_service", "tests/simulation")
NUM_SEEDS = 1_000_000
MUTANT_SEEDS = 10_000
SAVED_EVERY = 500
GOAL_SPEED = 100.0
LEAST_MUTANTS = 20


@dataclass
class State:
    """What was run. `next_seed`: all before were run; `failed`: seeds whose last run had a violation, with its first one."""

    next_seed: int = 1
    virtual_s: float = 0.0  # these two of the present code
    cpu_s: float = 0.0
    code: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    mutants: dict[str, int | None] = field(default_factory=dict)  # seeds until it was found; None: it was not

    @classmethod
    def read(cls, path: Path, code: str) -> State:
        """Return what is in the file. With other code, speed and mutants are measured again."""
        try:
            state = cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls(code=code)
        except (TypeError, ValueError) as error:
            raise SystemExit(f"{path} is not a state of this program ({error}): move it away to begin again") from None
        return state if state.code == code else cls(state.next_seed, code=code, failed=state.failed)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        os.replace(beside, path)


class Campaign:
    """All runs, from the first or from where they were interrupted."""

    def __init__(self, options: argparse.Namespace, state: State) -> None:
        self._options, self._state = options, state
        self._now: Callable[[], float] = machine.real("monotonic")
        self._ends_at: float = self._now() + options.seconds

    def run(self) -> bool:
        """Run what is left; return whether all is done."""
        return self._failed_again() and self._seeds() and self._mutants()

    def _failed_again(self) -> bool:
        cases = [Case(int(seed)) for seed in self._state.failed]
        for ran in self._outcomes(cases):
            self._note(ran)
        return self._has_time

    def _seeds(self) -> bool:
        state, last = self._state, self._options.num_seeds
        while state.next_seed <= last and self._has_time:
            end = min(state.next_seed + SAVED_EVERY, last + 1)
            before = children_cpu_s()
            for ran in self._outcomes(Case(seed) for seed in range(state.next_seed, end)):
                state.virtual_s += ran.virtual_s
                self._note(ran)
            state.cpu_s += children_cpu_s() - before
            state.next_seed = end
            state.write(self._options.state)
            speed = f"{state.virtual_s / state.cpu_s:.0f} simulated seconds in one of CPU"
            say(f"{end - 1} seeds, {len(state.failed)} with violations, {speed}")
        is_done: bool = state.next_seed > last
        return is_done

    def _mutants(self) -> bool:
        from tests.simulation.mutants import MUTANTS

        for name in MUTANTS:
            if name not in self._state.mutants:
                if not self._has_time:
                    return False
                found = seeds_until_found(name, self._options.children, self._options.mutant_seeds, lambda: self._has_time)
                if found is None and not self._has_time:
                    return False
                self._state.mutants[name] = found
                self._state.write(self._options.state)
                say(f"mutant {name}: {'not found' if found is None else f'found after {found} seeds'}")
        return True

    def _note(self, ran: Ran) -> None:
        failed, seed = self._state.failed, str(ran.case.seed)
        if not ran.violations:
            failed.pop(seed, None)
            return
        is_new = kind_of(ran.violations[0]) not in {kind_of(other) for other in failed.values()}
        failed[seed] = ran.violations[0]
        say(f"seed {seed}: {ran.violations[0]}\n    {ran.case.command}")
        if is_new:
            small, num_runs = shrunk(ran)
            say(f"    smaller, after {num_runs} runs: {small.violations[0]}\n    {small.case.command}")

    def _outcomes(self, cases: Any) -> Iterator[Ran]:
        return outcomes(cases, num_children=self._options.children)

    @property
    def _has_time(self) -> bool:
        now: float = self._now()
        return now < self._ends_at


def seeds_until_found(mutant: str, num_children: int, most: int, has_time: Callable[[], bool]) -> int | None:
    """Return the seed at which a bug that is put in is found first; None: by none, or in no time. It is put into a child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        status = 1
        try:
            os.write(writing, json.dumps(_found_here(mutant, num_children, most, has_time)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    if not data:
        raise RuntimeError(f"the process of mutant {mutant} did not end: run it alone, with tests.simulation.run --mutant")
    found: int | None = json.loads(data)
    return found


def _found_here(mutant: str, num_children: int, most: int, has_time: Callable[[], bool]) -> int | None:
    from tests.simulation.mutants import MUTANTS

    MUTANTS[mutant]()
    for first in itertools.count(1, num_children * BATCH):
        cases = [Case(seed) for seed in range(first, min(first + num_children * BATCH, most + 1))]
        if not cases or not has_time():
            return None
        bad = [ran.case.seed for ran in outcomes(cases, num_children=num_children) if ran.violations]
        if bad:
            return min(bad)
    return None


def code_digest() -> str:
    """Return what tells versions of the code apart."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def write_results(state: State) -> None:
    """Write what was measured, as benchmarks do."""
    from benchmarks.harness import Figure, write

    found = [number for number in state.mutants.values() if number is not None]
    write(
        "simulation",
        [
            Figure("seeds that were run once", state.next_seed - 1, "seeds", "higher", NUM_SEEDS),
            Figure("seeds with a violation", len(state.failed), "seeds", "lower", 0),
            Figure("simulated hours in an hour of CPU", round(state.virtual_s / state.cpu_s, 1), "h", "higher", GOAL_SPEED),
            Figure("bugs put in", len(state.mutants), "mutants", "higher", LEAST_MUTANTS),
            Figure("bugs not found", len(state.mutants) - len(found), "mutants", "lower", 0),
            Figure("the most seeds until a bug was found", max(found, default=0), "seeds", "lower", MUTANT_SEEDS),
        ],
        mutants=state.mutants,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    with_fixed_hashes("tests.simulation.simulate_all", arguments)
    prepare()
    state = State.read(options.state, code_digest())
    if not Campaign(options, state).run():
        say(f"interrupted behind seed {state.next_seed - 1}: run it again to go on")
        return int(bool(state.failed))
    write_results(state)
    return int(bool(state.failed) or None in state.mutants.values())


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.simulate_all")
    parser.add_argument("--num-seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--mutant-seeds", type=int, default=MUTANT_SEEDS, help="the most for each mutant")
    parser.add_argument("--children", type=int, default=len(os.sched_getaffinity(0)), help="processes that run at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after that time")
    parser.add_argument("--state", type=Path, default=STATE, help="the file of what is done")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
