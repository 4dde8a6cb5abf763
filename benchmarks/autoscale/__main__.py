"""`make bench-autoscale`: all parts, or those that `--only` names, one after the other. Each adds its figures to those of the
others in benchmarks/results/autoscale.json as soon as it is through.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from pathlib import Path

from benchmarks import parts
from benchmarks.autoscale.options import Options
from benchmarks.autoscale.results import save
from benchmarks.harness import Figure, say

# In the order of what they promise. Each is a module here with `figures(options)`, a coroutine or not.
PARTS = ("simulated", "speed", "local", "fidelity")
TRACES = "PDMESH_TRACES"


def run(names: list[str], options: Options) -> dict[str, str]:
    """Runs them; returns what failed, and why."""
    return parts.run(names, lambda name: _figures(name, options), _forget if options.quick else save)


def _figures(name: str, options: Options) -> parts.Measured:
    found: parts.Measured = importlib.import_module(f"benchmarks.autoscale.{name}").figures(options)
    return found


def _forget(name: str, figures: list[Figure]) -> None:
    """Of a quick run."""


def parts_of(only: str) -> list[str]:
    """The parts that were named, in their order; all, where none was. Raises ValueError that lists them."""
    return parts.chosen(only, PARTS)


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
    sys.exit(parts.told(failed))


if __name__ == "__main__":
    main()
