"""What every part is told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.harness import say
from pdmesh.models.catalogue import cache_folder
from pdmesh.models.registry import ensure_model

MODEL = "smollm2-135m-instruct"
"""Of the parts that run real workers."""


@dataclass(frozen=True)
class Options:
    """`quick`: only to see that all work. `traces`: the folder of the public traces, None: generated lengths stand in for them.
    `report`: where pages that show the runs are written."""

    quick: bool = False
    traces: Path | None = None
    report: Path = Path("build/autoscale")

    @property
    def folder(self) -> Path:
        """Where what a part has measured so far is kept until it is whole."""
        return cache_folder() / "autoscale" / ("quick" if self.quick else "full")

    @cached_property
    def model(self) -> Path:
        """The folder of MODEL, fetched when it is first asked for: the simulated parts need none."""
        return ensure_model(MODEL, say)

    def pick(self, full: float, quick: float) -> float:
        """The one that applies."""
        return quick if self.quick else full
