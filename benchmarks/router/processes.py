"""The processes of a measurement and what the kernel says of them: CPU time, resident memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One Python process that talks in lines of JSON."""

    popen: subprocess.Popen[str]

    @property
    def cpu_s(self) -> float:
        """CPU time of all of its threads so far, in user and kernel."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        lines = Path(f"/proc/{self.popen.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

    def hear(self) -> dict[str, Any]:
        """The next line that it says. Raises RuntimeError when it has ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.popen.args!r} ended with {self.popen.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self) -> dict[str, Any]:
        """Prompt it with an empty line."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()
        return self.hear()


@contextmanager
def running(module: str, *arguments: object) -> Iterator[Process]:
    """`python -m module arguments`, until the block ends."""
    argv = [sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as popen:
        try:
            yield Process(popen)
        finally:
            popen.kill()


@contextmanager
def router(
    folder: Path,
    *,
    step_s: float = 0.0,
    hold_after: int | None = None,
    profile: Path | None = None,
    settings: Sequence[object] = (),
) -> Iterator[tuple[Process, str]]:
    """A router process before two stub workers; its address. With `profile` it samples itself into that file."""
    hold = () if hold_after is None else ("--hold-after", hold_after)
    program = ("router",) if profile is None else ("benchmarks.router.profiled", profile)
    with running("benchmarks.router.stub_worker", "--step-s", step_s, *hold) as workers:
        addresses = workers.hear()["address"]
        flags = ("--port", 0, "--models", f"stub={folder}", "--workers", addresses, "--max-inflight", 1_000_000)
        with running(str(program[0]), *program[1:], *flags, *settings) as process:
            yield process, process.hear()["address"]
