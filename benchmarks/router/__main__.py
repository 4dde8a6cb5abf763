"""`make bench-router`: all parts, or those that `--only` names, one after the other. Each adds its figures to those of the others
in benchmarks/results/router.json as soon as it is through; the mixes go on where they were interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys

from benchmarks import parts
from benchmarks.harness import Figure, say
from benchmarks.peers.servers import watched_shared_memory
from benchmarks.router.options import MODEL, Kept, Options
from benchmarks.router.results import save
from pdmesh.models.registry import ensure_model

# In the order of what they promise. Each is a module here with `figures(options)`.
PARTS = ("mixes", "peers", "interference", "overhead", "prediction", "overload", "kill", "prefix")


def run(names: list[str], options: Options) -> dict[str, str]:
    """Runs them; returns what failed, and why."""
    return parts.run(names, lambda name: _figures(name, options), _forget if options.quick else save)


def _figures(name: str, options: Options) -> parts.Measured:
    part = importlib.import_module(f"benchmarks.router.{name}")
    # It needs no model.
    found: parts.Measured = part.figures(quick=options.quick) if name == "overhead" else part.figures(options)
    return found


def _forget(name: str, figures: list[Figure]) -> None:
    """Of a quick run."""


def parts_of(only: str) -> list[str]:
    """The parts that were named, in their order; all, where none was. Raises ValueError that lists them."""
    return parts.chosen(only, PARTS)


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
    sys.exit(parts.told(failed))


if __name__ == "__main__":
    main()
