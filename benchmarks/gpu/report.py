"""The table at the end, and the file: `{machine, command, figures}` like every benchmark's, with GPU, parts and notes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.gathered import Gathered
from benchmarks.harness import Figure, this_machine

_WIDTHS = (74, 12, 22, 10, 12)


def table(figures: Sequence[Figure]) -> str:
    """A line for each: name, value, unit, goal (with a mark where it is missed), limit."""
    lines = [_line(("figure", "value", "unit", "goal", "limit"))]
    lines += [_line((f.name, _number(f.value), f.unit, _goal(f), _number(f.limit))) for f in figures]
    return "\n".join(lines)


def misses(figure: Figure) -> bool:
    """Whether there is a goal that it does not reach; what is no number reaches none."""
    if figure.goal is None:
        return False
    if not isinstance(figure.value, (int, float)) or not isinstance(figure.goal, (int, float)):
        return figure.value != figure.goal
    return figure.value < figure.goal if figure.better == "higher" else figure.value > figure.goal


def write(path: Path, gathered: Gathered, parts: Mapping[str, str], gpu: Mapping[str, object]) -> None:
    """In one move, so that a run that is cut off while it writes leaves the file before."""
    document = {
        "machine": {**asdict(this_machine()), "gpu": dict(gpu)},
        "command": "benchmarks/gpu/run.sh",
        "figures": [asdict(figure) for figure in gathered.figures],
        "parts": dict(parts),
        "failures": gathered.failures,
        "notes": gathered.notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(beside, path)


def _line(cells: Sequence[str]) -> str:
    first, *others = (
        cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return " ".join((first, *others)).rstrip()


def _goal(figure: Figure) -> str:
    return "" if figure.goal is None else f"{_number(figure.goal)} {'MISSED' if misses(figure) else 'ok'}"


def _number(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.4g}"
