"""What every benchmark shares: the machine, figures, interleaved runs, one JSON file per `make bench-NAME`.

A benchmark is a list of *cases* (ours and the peers') run in turn, round after round, so that drift of a noisy machine
touches all of them alike; a figure is the median over rounds. `write` puts `{machine, command, figures}` where the
documents point to, as measured.
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"
PLAIN: Mapping[str, object] = {"speculation": "none"}
"""Settings of an engine whose steps are measured, or compared with those of others: one token of a sequence in each."""
PLAIN_FLAGS = ("--speculation", "none")
"""The same as a worker's flags."""


@dataclass(frozen=True)
class Figure:
    """One measured number. `goal` is what was asked for, `limit` the machine's in the same unit, `peer` what it ran against."""

    name: str
    value: float | str
    unit: str
    better: Literal["higher", "lower"]
    goal: float | str | None = None
    limit: float | None = None
    peer: str | None = None


@dataclass(frozen=True)
class Machine:
    """Where a result was measured."""

    cpu: str
    cores: int
    memory_gib: float
    python: str
    torch: str
    system: str


def this_machine() -> Machine:
    """Read off the machine; nothing that names it or its paths."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        python=platform.python_version(),
        torch=version("torch"),
        system=f"{platform.system()} {platform.machine()}",
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run every case once per round, in turn; returns the median of each."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            samples[name].append(case())
            say(f"round {number + 1}/{rounds}  {name}: {samples[name][-1]:.4g}")
    return {name: statistics.median(values) for name, values in samples.items()}


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds one line of JSON per figure."""
    print(text, file=sys.stderr, flush=True)


def write(name: str, figures: list[Figure], **extra: object) -> Path:
    """Write `benchmarks/results/NAME.json` and print each figure as a line of JSON."""
    for figure in figures:
        print(json.dumps(asdict(figure)))
    document = {
        "machine": asdict(this_machine()),
        "command": f"make bench-{name}" if not name.startswith(("equality", "chaos")) else f"make {name}",
        "figures": [asdict(figure) for figure in figures],
        **extra,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    say(f"wrote benchmarks/results/{path.name}")
    return path
