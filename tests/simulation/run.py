"""Runs seeds, each in a process of its own: python -m tests.simulation.run --seeds 1-1000, or --seed 17 --log.

A seed replays to the same event wherever it runs: hashes of texts are fixed (PYTHONHASHSEED), and each run begins in a copy of
the same fresh process.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from tests.simulation import machine

SHOWN = ("violations", "digest", "num_events", "virtual_s")


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execvpe(
            sys.executable, [sys.executable, "-m", "tests.simulation.run", *arguments], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    machine.install()
    prepare(options.mutant)
    if options.seed is not None:
        return _show(options.seed, log=options.log)
    first, _, last = options.seeds.partition("-")
    began, num_bad, virtual_s, num = machine.real("monotonic")(), 0, 0.0, 0
    for seed in range(int(first), int(last or first) + 1):
        outcome = in_child(seed)
        num += 1
        if options.json:
            print(json.dumps({"seed": seed, **{key: outcome.get(key) for key in SHOWN}}), flush=True)
        virtual_s += outcome.get("virtual_s", 0.0)
        if outcome["violations"]:
            num_bad += 1
            if options.stop:
                print(f"found after {num} seeds")
                print(f"seed {seed}: {outcome['violations'][0]}"[:300])
                return 1
            print(f"seed {seed}: {outcome['violations'][0]}"[:400], flush=True)
            if len(outcome["violations"]) > 1:
                print(f"    and {len(outcome['violations']) - 1} more")
    took = machine.real("monotonic")() - began
    print(f"{num} seeds, {num_bad} with violations, {virtual_s / took:.1f} x real time, {took / num * 1e3:.0f} ms a seed")
    return int(num_bad > 0)


def prepare(mutant: str = "") -> None:
    """Import, and make what all runs share."""
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


def run_seed(seed: int, *, log: bool = False) -> dict[str, Any]:
    """Run one seed in this process."""
    from tests.simulation.scenario import scenario
    from tests.simulation.simulate import Run

    run = Run(scenario(seed), log=log)
    outcome = run.run()
    return {
        "violations": outcome.violations,
        "digest": outcome.digest,
        "virtual_s": outcome.virtual_s,
        "num_events": outcome.num_events,
        "log": run.world.log,
        "got": [(got.took_s, got.longest_gap_s, got.is_over, repr(got.error)) for got in outcome.got],
    }


def in_child(seed: int, *, log: bool = False, timeout_s: int = 60) -> dict[str, Any]:
    """Run one seed in a child process, which ends by itself."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        import signal

        signal.alarm(timeout_s)
        try:
            outcome = run_seed(seed, log=log)
        except BaseException:  # noqa: BLE001  reported
            outcome = {"violations": [traceback.format_exc()], "digest": 0}
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data) if data else {"violations": ["the run did not end"], "digest": 0}


def _show(seed: int, *, log: bool) -> int:
    from tests.simulation.scenario import scenario

    logging.disable(logging.NOTSET)
    if log:
        logging.basicConfig(level=logging.INFO, format="%(vnow)s %(name)s %(message)s")
        logging.getLogger().handlers[0].addFilter(_with_time)
    shown = scenario(seed)
    print(shown)
    outcome = in_child(seed, log=log)
    for line in outcome.get("log") or ():
        print(line)
    print({key: value for key, value in outcome.items() if key != "log"})
    return int(bool(outcome["violations"]))


def _with_time(record: logging.LogRecord) -> bool:
    from tests.simulation.world import current_process

    process = current_process()
    record.vnow = "" if process is None else f"{process.world.now_ns / 1e9:.4f} {process.name}"
    return True


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="1-100")
    parser.add_argument("--mutant", default="")
    parser.add_argument("--stop", action="store_true", help="end at the first seed with a violation")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each seed")
    parser.add_argument("--log", action="store_true")
    return parser.parse_args(arguments)


def seeds(text: str) -> Iterator[int]:
    first, _, last = text.partition("-")
    return iter(range(int(first), int(last or first) + 1))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
