"""Runs pytest; what failed runs once more, alone, and what passes then is printed as a table with its first failure.

`python -m tests.repeat NAME PYTEST-ARGUMENTS`. A test that passes only when repeated is broken: if it happens twice in three runs
of NAME, the run fails. The runs before are remembered in the cache ($PDMESH_CACHE/repeated/NAME.json), as is pytest's report of
the latest one, with the time of each test (NAME.xml). At the end stand the files whose tests took longest.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdmesh.models.catalogue import cache_folder

NUM_RUNS = 3
MOST = 2
FAILED = 1
"""pytest's exit code when tests failed."""
NO_TESTS = 5
NUM_SHOWN = 25


@dataclass(frozen=True)
class Run:
    """Hold pytest's exit code, the first line of each failure by test, and the seconds that each file's tests took together."""

    code: int
    failures: Mapping[str, str]
    seconds: Mapping[str, float]


def run(arguments: Sequence[str], kept: Path | None = None) -> Run:
    """Run pytest; a copy of its report is `kept`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run([sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"], check=False)
        if not report.is_file():
            return Run(done.returncode, {}, {})
        if kept is not None:
            shutil.copy(report, kept)
        return Run(done.returncode, failures(report), seconds(report))


def failures(report: Path) -> dict[str, str]:
    """Return the first line of each failure or error in a JUnit report, by test."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            if (problem := case.find(kind)) is not None:
                first = (problem.get("message") or "").strip().splitlines() or ["?"]
                found[f"{case.get('classname')}::{case.get('name')}"] = first[0][:200]
    return found


def seconds(report: Path) -> dict[str, float]:
    """Return the seconds of each file's tests together, their fixtures included, longest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        found[case.get("classname") or "?"] += float(case.get("time") or 0)
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def slowest(by_file: Mapping[str, float]) -> str:
    """Return a line that names the files that took longest, with their seconds."""
    shown = [f"{name.removeprefix('tests.')} {took:.0f}" for name, took in list(by_file.items())[:NUM_SHOWN]]
    return f"seconds of {sum(by_file.values()):.0f}: {', '.join(shown)}"


def table(repeated: Mapping[str, str], before: Sequence[Sequence[str]]) -> Table:
    """Return what passed only when repeated, its first failure, and in how many of the latest runs."""
    shown = Table(title="failed, and passed when repeated", title_justify="left")
    for head in ("test", "first failure", f"of {NUM_RUNS} runs"):
        shown.add_column(head, overflow="fold")
    for name, problem in sorted(repeated.items()):
        shown.add_row(name, problem, str(times(name, before)))
    return shown


def times(name: str, before: Sequence[Sequence[str]]) -> int:
    """Return in how many of the latest runs it happened, this one included."""
    return 1 + sum(name in names for names in before[-(NUM_RUNS - 1) :])


def history(name: str) -> Path:
    """Return the file that remembers the runs before."""
    return cache_folder() / "repeated" / f"{name}.json"


def read(path: Path) -> list[list[str]]:
    """Return the tests that were repeated, run by run; nothing where no run is remembered."""
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
        return [[str(test) for test in tests] for tests in runs]
    except (OSError, ValueError, TypeError):
        return []


def main(argv: Sequence[str]) -> int:
    """Run, repeat, compare with the runs before; return the exit code."""
    name, *arguments = argv
    path = history(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = read(path)
    first = run(arguments, path.with_suffix(".xml"))
    code, repeated = first.code, dict[str, str]()
    print(slowest(first.seconds))
    if code == FAILED:
        again = run([*arguments, "--last-failed", "--last-failed-no-failures=none", "-n0"])
        code, repeated = again.code, {test: problem for test, problem in first.failures.items() if test not in again.failures}
        if repeated:
            Console(width=130).print(table(repeated, before))
    path.write_text(json.dumps([*before, sorted(repeated)][-NUM_RUNS:]), encoding="utf-8")
    too_often = [test for test in repeated if times(test, before) >= MOST]
    if too_often:
        print(f"repeated in {MOST} of {NUM_RUNS} runs, so broken: {', '.join(too_often)}")
    return code or (FAILED if too_often else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
