"""`make bench-autoscale`: all parts, or those that `--only` names, one after the other. Each adds its figures to those of the
others in benchmarks/results/autoscale.json as soon as it is through.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable
from dataclasses import asdict
from pathlib import Path

from benchmarks.autoscale.options import Options
from benchmarks.autoscale.results import save
from benchmarks.harness import Figure, say
from benchmarks.router.results import table

# In the order of what they promise. Each is a module here with `figures(options)`, a coroutine or not.
PARTS = ("simulated", "speed", "local", "fidelity")
TRACES = "PDMESH_TRACES"


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
    found = importlib.import_module(f"benchmarks.autoscale.{name}").figures(options)
    return asyncio.run(_cancellable(found)) if inspect.isawaitable(found) else list(found)


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


def traces_of(folder: str) -> Path | None:
    """The folder of public traces; None where none was named. Raises ValueError for one that is not there."""
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise ValueError(f"traces: {folder} is no folder; name the one that holds the public traces, or leave it out")
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscale", description=__doc__)
    parser.add_argument("--only", default="", help=f"of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="to see that all work, in short; no results are written")
    parser.add_argument(
        "--traces", default=os.environ.get(TRACES, ""), help=f"folder of the public traces ({TRACES}); without: generated lengths"
    )
    parser.add_argument("--report", type=Path, default=Options.report, help="folder for pages that show the runs")
    arguments = parser.parse_args()
    try:
        names, traces = parts_of(arguments.only), traces_of(arguments.traces)
    except ValueError as error:
        parser.error(str(error))
    try:
        failed = run(names, Options(arguments.quick, traces, arguments.report))
    except (asyncio.CancelledError, KeyboardInterrupt):
        say("interrupted")
        sys.exit(130)
    for name, why in failed.items():
        say(f"{name}: failed: {why}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
