"""`make bench-router`: all parts, or those that `--only` names, one after the other. Each adds its figures to those of the others
in benchmarks/results/router.json as soon as it is through; the mixes go on where they were interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import signal
import sys
import traceback
from collections.abc import Awaitable
from dataclasses import asdict

from benchmarks.capacity.processes import watched_shared_memory
from benchmarks.harness import Figure, say
from benchmarks.router.options import MODEL, Kept, Options
from benchmarks.router.results import save, table
from pdmesh.models import ensure_model

# In the order of what they promise. Each is a module here with `figures(options)`.
PARTS = ("mixes", "peers", "interference", "overhead", "prediction", "overload", "kill", "prefix")


def run(names: list[str], options: Options) -> dict[str, str]:
    """Runs them; returns what failed, and why."""
    failed: dict[str, str] = {}
    measured: list[Figure] = []
    for name in names:
        say(f"==> {name}")
        try:
            found = _figures(name, options)
        except Exception as error:  # noqa: BLE001  # one part that fails must not cost the others
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"{traceback.format_exc()}{name}: failed: {failed[name]}")
            continue
        _tell(name, found, options)
        measured += found
    say("\n".join(table(measured)))
    return failed


def _figures(name: str, options: Options) -> list[Figure]:
    part = importlib.import_module(f"benchmarks.router.{name}")
    if name == "overhead":  # it needs no model, and runs loops of its own
        return list(part.figures(quick=options.quick))
    return asyncio.run(_cancellable(part.figures(options)))


async def _cancellable(figures: Awaitable[list[Figure]]) -> list[Figure]:
    """SIGTERM is taken as Ctrl-C is: everything that was started is ended."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await figures


def _tell(name: str, figures: list[Figure], options: Options) -> None:
    for figure in figures:
        print(json.dumps(asdict(figure)), flush=True)
    if not options.quick:
        save(name, figures)


def parts_of(only: str) -> list[str]:
    """The parts that were named, in their order; all, where none was. Raises ValueError that lists them."""
    wanted = [name for name in only.split(",") if name] or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise ValueError(f"only: there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.add_argument("--only", default="", help=f"of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="to see that all work, in short windows; no results are written")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted run had measured")
    arguments = parser.parse_args()
    try:
        names = parts_of(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    options = Options(ensure_model(MODEL, say), arguments.quick)
    if arguments.fresh or arguments.quick:
        for name in names:
            Kept(options.folder / name).forget()
    try:
        with watched_shared_memory():
            failed = run(names, options)
    except (asyncio.CancelledError, KeyboardInterrupt):
        say("interrupted; the next run goes on with what was measured")
        sys.exit(130)
    for name, why in failed.items():
        say(f"{name}: failed: {why}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
