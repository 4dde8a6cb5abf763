"""Figures of all parts in one file: a part that is measured anew replaces its own and leaves the others'."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import RESULTS, Figure
from benchmarks.router.results import save_to

PATH = RESULTS / "autoscale.json"


def save(part: str, figures: Sequence[Figure]) -> None:
    """Writes them beside the others' where the documents point to, with this machine and the command."""
    save_to(PATH, {"command": "make bench-autoscale"}, part, figures)
