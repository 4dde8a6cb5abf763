"""Figures of all parts in one file: a part that is measured anew replaces its own and leaves the others'; a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Figure, say, this_machine
from benchmarks.router.options import MODEL

PATH = RESULTS / "router.json"


def merged(document: Mapping[str, Any], part: str, figures: Sequence[Figure]) -> dict[str, Any]:
    """The document with these figures as those of `part`, in the order of the parts' names; `figures` holds all of them. Pure."""
    parts = {**document.get("parts", {}), part: [asdict(figure) for figure in figures]}
    ordered = dict(sorted(parts.items()))
    return {**document, "figures": [figure for listed in ordered.values() for figure in listed], "parts": ordered}


def save(part: str, figures: Sequence[Figure]) -> None:
    """Writes them beside the others' where the documents point to, with this machine and the command."""
    save_to(PATH, {"command": "make bench-router", "model": MODEL}, part, figures)


def save_to(path: Path, command: Mapping[str, str], part: str, figures: Sequence[Figure]) -> None:
    """Into the results file of any benchmark that has parts."""
    known = json.loads(path.read_text()) if path.exists() else {}
    head = {"machine": asdict(this_machine()), **command}
    document = {**head, **merged({**known, **head}, part, figures)}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    say(f"{part}: wrote benchmarks/results/{path.name}")


def reached(figure: Figure) -> bool | None:
    """Whether a figure is as good as was asked for; None where nothing was asked, or it is no number. Pure."""
    if not isinstance(figure.goal, int | float) or not isinstance(figure.value, int | float):
        return None
    return figure.value >= figure.goal if figure.better == "higher" else figure.value <= figure.goal


def table(figures: Sequence[Figure]) -> list[str]:
    """A line for each figure: name, value, what was asked for and whether it is so."""
    width = max((len(figure.name) for figure in figures), default=0)
    return [
        f"{figure.name:<{width}}  {_number(figure.value):>12} {figure.unit:<11} {_verdict(figure)}".rstrip() for figure in figures
    ]


def _verdict(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    sign = ">=" if figure.better == "higher" else "<="
    verdict = {True: "reached", False: "MISSED", None: "no number"}[reached(figure)]
    return f"{sign} {_number(figure.goal)}: {verdict}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
