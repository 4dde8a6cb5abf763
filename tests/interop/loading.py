"""Load generators, which report medians: the command runs as its users run it, and its report is compared with the same medians
of the mesh's records of the same requests."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Figure, say
from benchmarks.peers.environments import PeerError, child_environment, ensure_environment, last_line, peers_folder
from tests.equality.prompts import SHORT
from tests.interop.load.generator import LoadGenerator, Report, Task
from tests.interop.records import Record, Records, timing
from tests.interop.site import Site

PROMPTS, MAX_TOKENS = SHORT * 2, 48
RUN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Load:
    """What a load generator reported, and the mesh's records of what it counted; `problem` if it could not take part."""

    report: Report | None = None
    records: tuple[Record, ...] = ()
    problem: str = ""


def run(generator: LoadGenerator, site: Site, records: Records) -> Load:
    """All prompts through one load generator."""
    try:
        python = ensure_environment(generator.environment, say)
        with tempfile.TemporaryDirectory(prefix="bench-load-") as temporary:
            task = Task(site, PROMPTS, generator.num_warm_up, MAX_TOKENS, Path(temporary))
            records.new()
            _call(generator, generator.command(python, task))
            report = _read(generator, task.folder)
        return Load(report, _counted(report, task, records.new()))
    except PeerError as error:
        return Load(problem=str(error))


def _read(generator: LoadGenerator, folder: Path) -> Report:
    try:
        return generator.report(folder)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise PeerError(f"its report cannot be read: {type(error).__name__}: {error}") from error


def _call(generator: LoadGenerator, command: list[str]) -> None:
    """Runs it; what it starts ends with it. PeerError: it failed, or took too long."""
    log = peers_folder() / "logs" / f"{generator.environment.name}-load.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = child_environment(generator.variables)
    for name in generator.unset:
        variables.pop(name, None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True
        )
    try:
        process.wait(RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PeerError(f"had not ended after {RUN_TIMEOUT_S:g} s: {last_line(log)}") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise PeerError(f"ended with code {process.returncode}: {last_line(log)}")


def _counted(report: Report, task: Task, records: tuple[Record, ...]) -> tuple[Record, ...]:
    """Without the warm-up, which came first. PeerError where tool and mesh do not mean the same requests."""
    if len(records) != task.num_warm_up + report.num_completed:
        raise PeerError(
            f"reports {report.num_completed} requests after {task.num_warm_up} to warm up; the mesh completed {len(records)}"
        )
    return records[task.num_warm_up :]


def figures_of(generator: LoadGenerator, load: Load) -> list[Figure]:
    """Of one run."""
    name, total = generator.name, len(PROMPTS)
    completed = f"{name}: requests completed"
    if load.report is None:
        return [Figure(completed, f"none: {load.problem}", "", "higher", goal=total)]
    return [
        Figure(completed, load.report.num_completed, f"of {total}", "higher", goal=total),
        timing(f"{name}: TTFT", load.report.ttft_s, [record.ttft_s for record in load.records]),
        timing(f"{name}: {generator.tpot}", load.report.tpot_s, [record.tpot_s for record in load.records]),
    ]
