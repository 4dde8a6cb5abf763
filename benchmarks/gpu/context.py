"""What a part is given, and where its figures go as soon as they are known: who is stopped loses only what was not begun."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.shapes import Scale
from benchmarks.gpu.timing import Deadline
from benchmarks.harness import Figure, say
from pdmesh.engine.hardware import MachineLimits, measure_limits


@dataclass
class Context:
    """`limits` None: nobody has measured them, so a part that needs them does."""

    device: str
    scale: Scale
    deadline: Deadline
    sink: Path
    limits: MachineLimits | None = None
    capability: int = 90  # whose kernels are compiled ahead, as CUDA counts: 90 is Hopper
    num_failures: int = field(default=0)

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.scale.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def machine(self) -> MachineLimits:
        if self.limits is None:
            self.limits = measure_limits("triton", self.scale.dtype, self.device, 0)
        return self.limits

    def add(self, figure: Figure) -> None:
        self._write({"figure": asdict(figure)})
        goal = f"  (goal {figure.goal})" if figure.goal is not None else ""
        say(f"  {figure.name}: {_short(figure.value)} {figure.unit}{goal}")

    def note(self, text: str) -> None:
        """What is no number: what was counted, what was not measured and why."""
        self._write({"note": text})
        say(f"  {text}")

    def fail(self, text: str) -> None:
        self.num_failures += 1
        self._write({"failure": text})
        say(f"  NOT EQUAL: {text}")

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether so much is left; says what is left out if not."""
        if self.deadline.allows(seconds):
            return True
        self.note(f"left out, as the part's time was used up: {what}")
        return False

    def _write(self, line: dict[str, object]) -> None:
        with self.sink.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
