"""Item 4: what it is worth that a draft ends where its chance no longer pays, against drafts of one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Bench, Task, as_many, groups, of_length
from benchmarks.spec.turns import rates, warm
from pdmesh.engine.engine import Engine

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
NUM_TASKS = {1: 12, 8: 16}
"""By batch."""
NUM_TOKENS = 128
THRESHOLD = "threshold"
GOAL = 1.1


def threshold_figures(bench: Bench, tasks: Sequence[Task], rounds: int) -> Iterator[Figure]:
    """The policy's lengths ÷ the best fixed one over the same mixed tasks, with the same proposers."""
    for batch, count in NUM_TASKS.items():
        some = [task.shorter(NUM_TOKENS) for task in as_many(tasks, count)]
        found = _measured(bench, list(groups(some, batch)), rounds)
        yield from _figures(f"mixed, batch {batch}", found)


def _measured(bench: Bench, some: Sequence[Sequence[Task]], rounds: int) -> dict[str, float]:
    """Tokens per second, medians over rounds. Engines are new in each: they learn."""
    samples: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, rate in rates(_engines(bench, some), some).items():
            samples.setdefault(name, []).append(rate)
        said = "  ".join(f"{name} {values[-1]:.0f}/s" for name, values in samples.items())
        say(f"round {number + 1}/{rounds}, groups of {len(some[0])}: {said}")
    return {name: median(values) for name, values in samples.items()}


def _engines(bench: Bench, some: Sequence[Sequence[Task]]) -> dict[str, Engine]:
    engines = {THRESHOLD: bench.guessing("auto")}
    engines |= {f"fixed {length}": bench.guessing("auto", **of_length(length)) for length in LENGTHS}
    for engine in engines.values():
        for group in some:
            if len(group) > 1:  # alone, a prompt is over before the clock starts
                warm(engine, group)
    return engines


def _figures(kind: str, found: dict[str, float]) -> Iterator[Figure]:
    best = max((name for name in found if name != THRESHOLD), key=found.__getitem__)
    gain = round(found[THRESHOLD] / found[best], 3)
    yield Figure(f"{kind}: threshold / best fixed length", gain, "x", "higher", GOAL, None, best)
    for name, value in found.items():
        yield Figure(f"{kind}: {name}", round(value, 1), "tokens/s", "higher")
