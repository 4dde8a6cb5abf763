"""Measures how fast a worker is on this machine, in a child process: this one never loads torch."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pdmesh.runtime.child import import_path, python_command
from pdmesh.simulator.workers.spec import WorkerSpec, spec_of

START_S = 600.0
"""Seconds to load the model and to compile kernels, besides measuring."""


class MeasureError(Exception):
    """Raised when the measurement failed: why."""


@dataclass(frozen=True)
class Measured:
    """Hold the measurement. `written`: the JSON file, which `--speed` takes."""

    spec: WorkerSpec
    written: Path


def measure(engine: dict[str, str | int | list[str]], seconds: float, written: Path) -> Measured:
    """Measure an engine. `engine`: fields of EngineConfig. Its progress goes to standard error. Raises MeasureError."""
    asked = json.dumps({"engine": engine, "seconds": seconds})
    command = python_command("-m", "pdmesh.planner.engine_curve", asked)
    try:
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, **import_path()},
            timeout=seconds + START_S,
            check=False,
            text=True,
        )
    except subprocess.TimeoutExpired:
        raise MeasureError(
            f"measure: no answer within {seconds + START_S:.0f} s; is this machine busy with something else?"
        ) from None
    if ended.returncode:
        raise MeasureError("measure: the engine could not be measured; what it said stands above")
    try:
        table = json.loads(ended.stdout.splitlines()[-1])
        spec = spec_of(table)
        written.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except (IndexError, ValueError) as error:
        raise MeasureError(f"measure: the engine's steps make no model: {error}; measure for longer (--measure-s)") from error
    except OSError as error:
        raise MeasureError(f"speed: {written}: {error.strerror}; give a file in a folder that is there") from error
    return Measured(spec, written)
