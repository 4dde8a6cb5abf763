"""The run of all parts, each in a process, and what becomes of them."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from benchmarks.gpu.gathered import Gathered
from benchmarks.gpu.missing import describe_gpu
from benchmarks.gpu.parts.machine import COPY, PRODUCT
from benchmarks.gpu.plan import Part, allotment_s
from benchmarks.gpu.process import PartProcess
from benchmarks.gpu.report import table, write
from benchmarks.harness import RESULTS, say


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
