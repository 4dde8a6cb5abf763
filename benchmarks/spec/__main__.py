"""`make bench-spec`: speculation: all parts, or those that `--only` names. Each adds its figures to those of the others in
benchmarks/results/spec.json as soon as it is through. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks import parts
from benchmarks.harness import RESULTS, Figure, say
from benchmarks.router.results import save_to
from benchmarks.spec import curve, speed, tokens
from benchmarks.spec.prompts import varied_prompts
from benchmarks.spec.runs import Bench, Task
from benchmarks.spec.workloads import WORKLOADS, jobs
from engine.speculation.heads.weights import FILE
from engine.speculation.setup import heads_path
from pdmesh.models import DEFAULT_MODEL, ensure_model
from text.tokenizer import Tokenizer

PATH = RESULTS / "spec.json"
NUM_JOBS = 36
"""Of each workload: so many are different texts."""
SELF_DRAFT_LAYERS = 24


@dataclass(frozen=True)
class Parts:
    """What the parts share. `quick`: to see that all work, in short."""

    folder: Path
    quick: bool

    @cached_property
    def bench(self) -> Bench:
        return Bench(self.folder, self_draft_layers=SELF_DRAFT_LAYERS)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @cached_property
    def workloads(self) -> Mapping[str, Sequence[Task]]:
        return {kind: self._tasks(kind) for kind in WORKLOADS}

    def _tasks(self, kind: str) -> list[Task]:
        encode = self.tokenizer.encode
        return [Task(tuple(encode(job.prompt)), job.params) for job in jobs(kind, 2 if self.quick else NUM_JOBS, encode)]

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        prompts = varied_prompts()[:: 25 if self.quick else 1]
        return [tuple(self.tokenizer.encode(prompt.text)) for prompt in prompts]

    @cached_property
    def names(self) -> list[str]:
        """Of proposers and their combinations; heads only where some are trained."""
        names = ["auto", "prompt_lookup", "retrieval", "lookahead", "self_draft", "prompt_lookup,retrieval"]
        if heads_path(self.bench.config) is None:
            say(f"heads: skipped: there is no {FILE} beside the model; make train-heads")
            return names
        return [*names, "heads"]

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    def figures(self, part: str) -> parts.Measured:
        names, workloads = self.names, self.workloads
        measures: Mapping[str, Callable[[], parts.Measured]] = {
            "tokens": lambda: tokens.engine_figures(self.bench, self.prompts, names),
            "mesh": lambda: tokens.mesh_figures(self.folder, self.prompts, ["prompt_lookup", "auto"], self.bench),
            "curve": lambda: curve.cost_figures(self.bench),
            "forced": lambda: curve.forced_figures(self.bench, [task.prompt for task in workloads["prose"][:3]], self.rounds),
            "gain": lambda: speed.gain_figures(self.bench, workloads, names, self.rounds),
            "safety": lambda: speed.safety_figures(self.bench, workloads, self.rounds),
            "threshold": lambda: speed.threshold_figures(self.bench, workloads["mixed"], self.rounds),
        }
        return measures[part]()


PARTS = ("tokens", "mesh", "curve", "forced", "gain", "safety", "threshold")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spec", description=__doc__)
    parser.add_argument("--only", default="", help=f"of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="to see that all work, in short; no results are written")
    arguments = parser.parse_args()
    try:
        names = parts.chosen(arguments.only, PARTS)
    except ValueError as error:
        parser.error(str(error))
    shared = Parts(ensure_model(DEFAULT_MODEL, say), arguments.quick)
    sys.exit(parts.told(parts.run(names, shared.figures, _forget if arguments.quick else _save)))


def _save(part: str, figures: list[Figure]) -> None:
    save_to(PATH, {"command": "make bench-spec"}, part, figures)


def _forget(part: str, figures: list[Figure]) -> None:
    """Of a quick run."""


if __name__ == "__main__":
    main()
