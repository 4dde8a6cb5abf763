"""Items 2, 3 and 4: how much faster answers come, that they never come slower, and what the threshold is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness import Figure
from benchmarks.spec.runs import Bench, Task, ratio, speeds
from engine.speculation.proposer import Proposer

BATCHES = (1, 4, 16, 32)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
Makers = Mapping[str, Callable[[], Sequence[Proposer]]]


def gain_figures(bench: Bench, workloads: Mapping[str, Sequence[Task]], makers: Makers, rounds: int) -> list[Figure]:
    """Speculation ÷ none at batch 1, each set of proposers by each workload."""
    goals = {("copy", "prompt_lookup"): 2.5, ("prose", "prompt_lookup"): 1.0}
    figures = []
    for kind, tasks in workloads.items():
        for name, make in makers.items():
            engines = {"on": bench.engine(make()), "off": bench.engine()}
            found = ratio(engines, tasks, 1, rounds)
            goal = goals.get((kind, name), 1.2 if kind == "prose" else None)
            figures.append(Figure(f"{kind}, batch 1: {name} / none", round(found, 3), "x", "higher", goal))
    return figures


def safety_figures(
    bench: Bench, workloads: Mapping[str, Sequence[Task]], make: Callable[[], Sequence[Proposer]], rounds: int
) -> list[Figure]:
    """Speculation ÷ none at every batch size."""
    figures = []
    for kind, tasks in workloads.items():
        for batch in BATCHES:
            engines = {"on": bench.engine(make()), "off": bench.engine()}
            some = list(tasks) * (1 + batch // len(tasks))
            found = ratio(engines, some[: max(batch, 4)], batch, rounds)
            figures.append(Figure(f"{kind}, batch {batch}: on / off", round(found, 3), "x", "higher", 0.98))
    return figures


def threshold_figures(bench: Bench, tasks: Sequence[Task], make: Callable[[], Sequence[Proposer]], rounds: int) -> list[Figure]:
    """The policy's lengths ÷ the best fixed one."""
    engines = {"threshold": bench.engine(make())}
    engines |= {f"fixed {length}": bench.engine(make(), draft_length=length) for length in LENGTHS}
    found = speeds(engines, tasks, 1, rounds)
    best = max((name for name in found if name != "threshold"), key=found.__getitem__)
    gain = round(found["threshold"] / found[best], 3)
    figures = [Figure("mixed, batch 1: threshold / best fixed length", gain, "x", "higher", 1.1, None, best)]
    figures += [Figure(f"mixed, batch 1: {name}", round(value, 1), "tokens/s", "higher") for name, value in found.items()]
    return figures
