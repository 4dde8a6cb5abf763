"""A worker that also writes down what its steps took: `python -m benchmarks.autoscale.logged_worker FILE ARGUMENTS OF A WORKER`.

A line for each step: when it began and ended (monotonic seconds), then the four counts of its work. Steps reach the event loop
after the engine has gone on: writing them makes none of them longer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from pdmesh.engine.outputs import StepResult
from pdmesh.worker.load import StepWatch
from pdmesh.worker.main import main

Step = tuple[float, ...]


def logged(on_step: Callable[[StepWatch, StepResult], None], into: TextIO) -> Callable[[StepWatch, StepResult], None]:
    """`on_step` of a StepWatch, with a line for each step."""

    def on_logged(watch: StepWatch, result: StepResult) -> None:
        on_step(watch, result)
        work = " ".join(map(str, result.work))
        into.write(f"{result.started_ns / 1e9:.6f} {result.ended_ns / 1e9:.6f} {work}\n")

    return on_logged


def read_steps(path: Path, from_s: float, until_s: float) -> list[Step]:
    """The steps that began in that time."""
    rows = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
    return [row for row in rows if len(row) == 6 and from_s <= row[0] < until_s]


if __name__ == "__main__":
    with Path(sys.argv.pop(1)).open("w", buffering=1) as _file:
        setattr(StepWatch, "on_step", logged(StepWatch.on_step, _file))  # noqa: B010  mypy knows no method that changes
        main()
