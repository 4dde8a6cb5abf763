"""The run of all parts, each in a process, and what becomes of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import harness
from benchmarks.gpu.__main__ import describe_gpu
from benchmarks.gpu.parts.machine import COPY, PRODUCT
from benchmarks.gpu.plan import NOT_EQUAL, Part, allotment_s
from benchmarks.harness import RESULTS, Figure, reached, say, this_machine, write_document

# What the parts of a run wrote, read by the process that started them.


@dataclass
class Gathered:
    """What one part wrote, and what became of it."""

    became: str = ""
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, kept: Mapping[str, Any], figures: Mapping[str, Figure]) -> Gathered:
        """Of a document's part, with its figures by name."""
        return cls(kept["became"], [figures[name] for name in kept["figures"]], list(kept["notes"]), list(kept["failures"]))

    def read(self, sink: Path) -> None:
        """All whole lines of a part's file; the last one of a part that was killed may be half a line."""
        for line in _whole_lines(sink):
            if "figure" in line:
                self.figures.append(Figure(**line["figure"]))
            self.notes += [str(line["note"])] if "note" in line else []
            self.failures += [str(line["failure"])] if "failure" in line else []

    def as_part(self) -> dict[str, object]:
        """For the document, whose figures are in a list of their own."""
        return {**asdict(self), "figures": [figure.name for figure in self.figures]}


def figures_of(parts: Mapping[str, Gathered]) -> list[Figure]:
    return [figure for part in parts.values() for figure in part.figures]


def value_of(parts: Mapping[str, Gathered], name: str) -> float | None:
    found = next((figure.value for figure in figures_of(parts) if figure.name == name), None)
    return found if isinstance(found, float) else None


def _whole_lines(sink: Path) -> Iterator[dict[str, Any]]:
    text = sink.read_text() if sink.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


# A part's process: ended with its children when its time is over, whatever state the GPU is in.


GRACE_S = 3.0


class PartProcess:
    """In a session of its own, so that what it started (a mesh) goes with it."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv

    def run(self, seconds: float) -> str:
        """What became of it: `done`, or how it ended. It gets SIGTERM after so long, and SIGKILL soon after."""
        process = subprocess.Popen(self._argv, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"cut off after {seconds:.0f} s"
        finally:
            _end(process)
        return _words(status)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its whole session; a second signal for who does not mind the first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


DONE = "done"


def _words(status: int) -> str:
    if status == 0:
        return DONE
    if status < 0:
        return f"ended by signal {-status}"
    return "something was not equal" if status == NOT_EQUAL else f"failed with status {status}; its output says why"


# The table at the end, and the file: `{machine, command, figures}` like all, with the GPU, and what each part found.


def table(figures: Sequence[Figure]) -> str:
    """A line for each, with a mark where its goal is missed."""
    return "\n".join(["figures, their limits and goals", *harness.table(figures, "ok")])


def misses(figure: Figure) -> bool:
    """Whether there is a goal that it does not reach; what is no number reaches none."""
    return figure.goal is not None and not reached(figure)


def write(path: Path, parts: Mapping[str, Gathered], gpu: Mapping[str, object]) -> None:
    """What is known so far."""
    document = {
        "machine": {**asdict(this_machine()), "gpu": dict(gpu)},
        "command": "benchmarks/gpu/run.sh",
        "figures": [asdict(figure) for figure in figures_of(parts)],
        "parts": {name: part.as_part() for name, part in parts.items()},
    }
    write_document(path, document)


def kept_parts(path: Path, gpu: Mapping[str, object]) -> dict[str, Gathered]:
    """What was done before, of a file that another run wrote on such a GPU with the same packages; else nothing."""
    if not path.is_file():
        return {}
    document = json.loads(path.read_text())
    if document.get("machine", {}).get("gpu") != dict(gpu):
        say(f"{path.name} is of another GPU or of other packages: nothing of it is kept")
        return {}
    figures = {each["name"]: Figure(**each) for each in document["figures"]}
    return {name: Gathered.of(part, figures) for name, part in document["parts"].items() if part["became"] == DONE}


class CutOff(Exception):
    """The run was told to end."""


def run_parts(args: argparse.Namespace) -> int:
    """Exit status."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-gpu-bench-") as scratch:
        run = Run(args, Path(scratch))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _cut_off)
        try:
            run.all_parts()
        except CutOff:
            say("cut off: what is known follows")
        finally:
            run.report()
    return run.status


def _cut_off(number: int, frame: FrameType | None) -> None:
    raise CutOff


@dataclass
class Run:
    """Parts one after the other, and what became of each."""

    args: argparse.Namespace
    scratch: Path
    parts: dict[str, Gathered] = field(default_factory=dict)

    def __post_init__(self) -> None:
        used_s = max(0.0, time.time() - self.args.started) if self.args.started else 0.0
        self._end = time.monotonic() + self.args.limit - used_s
        self._gpu: dict[str, object] = describe_gpu() if self.args.device == "cuda" else {"name": "none: Triton's interpreter"}
        say(f"on {self._gpu['name']}")
        if self.args.resume and self.output is not None:
            self.parts = kept_parts(self.output, self._gpu)

    @property
    def output(self) -> Path | None:
        is_whole = not self.args.names and self.args.device == "cuda" and not self.args.tiny
        found: Path | None = self.args.output or (RESULTS / "gpu.json" if is_whole else None)
        return found

    @property
    def status(self) -> int:
        has_broken = any(part.became != DONE or part.failures for part in self.parts.values())
        return 1 if has_broken or any(part.name not in self.parts for part in self.args.parts) else 0

    def all_parts(self) -> None:
        parts: Sequence[Part] = [part for part in self.args.parts if part.name not in self.parts]
        for index, part in enumerate(parts):
            seconds = allotment_s(part, parts[index + 1 :], self._end - time.monotonic())
            if seconds is None:
                self.parts[part.name] = Gathered("left out: no time")
                continue
            self._part(part, seconds)
            self._write()

    def _part(self, part: Part, seconds: float) -> None:
        say(f"{part.name} ({part.does}; at most {seconds:.0f} s)")
        sink, began = self.scratch / f"{part.name}.jsonl", time.monotonic()
        argv = self._argv(part, sink, seconds)
        gathered = self.parts[part.name] = Gathered("cut off")
        try:
            gathered.became = PartProcess(argv).run(seconds)
        finally:
            gathered.read(sink)
            say(f"{part.name}: {gathered.became} ({time.monotonic() - began:.1f} s)")

    def _argv(self, part: Part, sink: Path, seconds: float) -> list[str]:
        argv = [sys.executable, "-m", "benchmarks.gpu.part", part.name, "--sink", str(sink), "--seconds", f"{seconds:.1f}"]
        argv += ["--device", self.args.device, *(["--tiny"] if self.args.tiny else [])]
        argv += [] if "capability" not in self._gpu else ["--capability", str(self._gpu["capability"]).replace(".", "")]
        copy, product = value_of(self.parts, COPY), value_of(self.parts, PRODUCT)
        return argv if copy is None or product is None else [*argv, "--bandwidth", f"{copy}", "--peak", f"{product}"]

    def _write(self) -> None:
        if self.output is not None:
            write(self.output, self.parts, self._gpu)

    def report(self) -> None:
        self._write()
        print(table(figures_of(self.parts)))
        for text in (text for part in self.parts.values() for text in part.failures):
            print(f"NOT EQUAL: {text}")
        for name, part in self.parts.items():
            print(f"part {name}: {part.became}")
        if self.output is not None:
            say(f"wrote {self.output}")
