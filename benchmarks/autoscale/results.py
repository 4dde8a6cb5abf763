"""Figures of all parts in one file: a part that is measured anew replaces its own and leaves the others'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.harness import RESULTS, Figure, say, this_machine
from benchmarks.router.results import merged

PATH = RESULTS / "autoscale.json"


def save(part: str, figures: Sequence[Figure]) -> None:
    """Writes them beside the others' where the documents point to, with this machine and the command."""
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    head = {"machine": asdict(this_machine()), "command": "make bench-autoscale"}
    document = {**head, **merged({**known, **head}, part, figures)}
    RESULTS.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(document, indent=1) + "\n")
    say(f"{part}: wrote benchmarks/results/{PATH.name}")
