"""`make bench-autoscale`: all parts, or those that `--only` names, one after the other. Each adds its figures to those of the
others in benchmarks/results/autoscale.json as soon as it is through.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.autoscale.scenario import Options
from benchmarks.harness import Measured, Suite

# In the order of what they promise. Each is a module here with `figures(options)`, a coroutine or not.
PARTS = ("simulated", "starts", "speed", "local", "zero", "fidelity")
SUITE = Suite("autoscale", PARTS)
TRACES = "PDMESH_TRACES"


def measure(options: Options) -> Callable[[str], Measured]:
    """A part by its name."""

    def figures(name: str) -> Measured:
        found: Measured = importlib.import_module(f"benchmarks.autoscale.{name}").figures(options)
        return found

    return figures


def traces_of(folder: str) -> Path | None:
    """The folder of public traces; None where none was named. Raises ValueError for one that is not there."""
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise ValueError(f"traces: {folder} is no folder; name the one that holds the public traces, or leave it out")
    return Path(folder)


def main() -> None:
    parser = SUITE.parser(__doc__)
    generated = f"folder of the public traces ({TRACES}); without: generated lengths"
    parser.add_argument("--traces", default=os.environ.get(TRACES, ""), help=generated)
    parser.add_argument("--report", type=Path, default=Options.report, help="folder for pages that show the runs")
    arguments, names = SUITE.arguments(parser)
    try:
        traces = traces_of(arguments.traces)
    except ValueError as error:
        parser.error(str(error))
    SUITE.main(names, measure(Options(quick=arguments.quick, traces=traces, report=arguments.report)), quick=arguments.quick)


if __name__ == "__main__":
    main()
