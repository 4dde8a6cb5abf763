"""What the parts of a run wrote, read by the process that started them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure


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
