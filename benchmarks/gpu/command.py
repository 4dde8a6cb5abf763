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
    """What parts wrote."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def read(self, sink: Path) -> None:
        """All whole lines of a part's file; the last one of a part that was killed may be half a line."""
        for line in _whole_lines(sink):
            if "figure" in line:
                self.figures.append(Figure(**line["figure"]))
            self.notes += [str(line["note"])] if "note" in line else []
            self.failures += [str(line["failure"])] if "failure" in line else []

    def value_of(self, name: str) -> float | None:
        found = next((figure.value for figure in self.figures if figure.name == name), None)
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


def _words(status: int) -> str:
    if status == 0:
        return "done"
    if status < 0:
        return f"ended by signal {-status}"
    return "something was not equal" if status == NOT_EQUAL else f"failed with status {status}; its output says why"


# The table at the end, and the file: `{machine, command, figures}` like every benchmark's, with GPU, parts and notes.


def table(figures: Sequence[Figure]) -> str:
    """A line for each, with a mark where its goal is missed."""
    return "\n".join(["figures, their limits and goals", *harness.table(figures, "ok")])


def misses(figure: Figure) -> bool:
    """Whether there is a goal that it does not reach; what is no number reaches none."""
    return figure.goal is not None and not reached(figure)


def write(path: Path, gathered: Gathered, parts: Mapping[str, str], gpu: Mapping[str, object]) -> None:
    """What is known so far."""
    document = {
        "machine": {**asdict(this_machine()), "gpu": dict(gpu)},
        "command": "benchmarks/gpu/run.sh",
        "figures": [asdict(figure) for figure in gathered.figures],
        "parts": dict(parts),
        "failures": gathered.failures,
        "notes": gathered.notes,
    }
    write_document(path, document)


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
    gathered: Gathered = field(default_factory=Gathered)
    became: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        used_s = max(0.0, time.time() - self.args.started) if self.args.started else 0.0
        self._end = time.monotonic() + self.args.limit - used_s
        self._gpu: dict[str, object] = describe_gpu() if self.args.device == "cuda" else {"name": "none: Triton's interpreter"}
        say(f"on {self._gpu['name']}")

    @property
    def output(self) -> Path | None:
        is_whole = not self.args.names and self.args.device == "cuda" and not self.args.tiny
        found: Path | None = self.args.output or (RESULTS / "gpu.json" if is_whole else None)
        return found

    @property
    def status(self) -> int:
        has_broken = any(words != "done" for words in self.became.values())
        return 1 if self.gathered.failures or has_broken or len(self.became) < len(self.args.parts) else 0

    def all_parts(self) -> None:
        parts: Sequence[Part] = self.args.parts
        for index, part in enumerate(parts):
            seconds = allotment_s(part, parts[index + 1 :], self._end - time.monotonic())
            if seconds is None:
                self.became[part.name] = "left out: no time"
                continue
            self._part(part, seconds)
            self._write()

    def _part(self, part: Part, seconds: float) -> None:
        say(f"{part.name} ({part.does}; at most {seconds:.0f} s)")
        sink, began = self.scratch / f"{part.name}.jsonl", time.monotonic()
        self.became[part.name] = "cut off"
        try:
            self.became[part.name] = PartProcess(self._argv(part, sink, seconds)).run(seconds)
        finally:
            self.gathered.read(sink)
            say(f"{part.name}: {self.became[part.name]} ({time.monotonic() - began:.1f} s)")

    def _argv(self, part: Part, sink: Path, seconds: float) -> list[str]:
        argv = [sys.executable, "-m", "benchmarks.gpu.part", part.name, "--sink", str(sink), "--seconds", f"{seconds:.1f}"]
        argv += ["--device", self.args.device, *(["--tiny"] if self.args.tiny else [])]
        argv += [] if "capability" not in self._gpu else ["--capability", str(self._gpu["capability"]).replace(".", "")]
        copy, product = self.gathered.value_of(COPY), self.gathered.value_of(PRODUCT)
        return argv if copy is None or product is None else [*argv, "--bandwidth", f"{copy}", "--peak", f"{product}"]

    def _write(self) -> None:
        if self.output is not None:
            write(self.output, self.gathered, self.became, self._gpu)

    def report(self) -> None:
        self._write()
        print(table(self.gathered.figures))
        for text in self.gathered.failures:
            print(f"NOT EQUAL: {text}")
        for name, words in self.became.items():
            print(f"part {name}: {words}")
        if self.output is not None:
            say(f"wrote {self.output}")
