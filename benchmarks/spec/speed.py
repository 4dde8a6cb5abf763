"""Items 2, 3 and 4: how much faster answers come, that they never come slower, and what the threshold is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness import Figure
from benchmarks.spec.runs import Bench, Task, ratio, speeds

BATCHES = (1, 4, 16, 32)
NUM_ALONE = 12
"""Jobs of a round, where a batch is no larger."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
Workloads = Mapping[str, Sequence[Task]]


def gain_figures(bench: Bench, workloads: Workloads, names: Sequence[str], rounds: int) -> list[Figure]:
    """Speculation ÷ none at batch 1, by proposers and workload."""
    figures = []
    for kind, tasks in workloads.items():
        for name in names:
            found = ratio(lambda name=name: bench.guessing(name), bench.engine, tasks[:NUM_ALONE], 1, rounds)  # type: ignore[misc]
            figures.append(Figure(f"{kind}, batch 1: {name} / none", round(found, 3), "x", "higher", _goal(kind, name)))
    return figures


def _goal(kind: str, name: str) -> float | None:
    if kind == "copying":
        return 2.5 if name == "prompt_lookup" else None
    if kind == "prose":
        return 1.0 if name == "auto" else 1.2 if name in ("heads", "self_draft") else None
    return None


def safety_figures(bench: Bench, workloads: Workloads, rounds: int) -> list[Figure]:
    """Speculation ÷ none at every batch size, with what `--speculation auto` has."""
    figures = []
    for kind, tasks in workloads.items():
        for batch in BATCHES:
            some = (list(tasks) * (1 + batch // len(tasks)))[: max(batch, NUM_ALONE)]
            found = ratio(lambda: bench.guessing("auto"), bench.engine, some, batch, rounds)
            figures.append(Figure(f"{kind}, batch {batch}: on / off", round(found, 3), "x", "higher", 0.98))
    return figures


def threshold_figures(bench: Bench, tasks: Sequence[Task], rounds: int) -> list[Figure]:
    """The policy's lengths ÷ the best fixed one."""
    engines = {"threshold": bench.guessing("auto")}
    engines |= {f"fixed {length}": bench.guessing("auto", draft_length=length) for length in LENGTHS}
    found = speeds(engines, tasks[:NUM_ALONE], 1, rounds)
    best = max((name for name in found if name != "threshold"), key=found.__getitem__)
    gain = round(found["threshold"] / found[best], 3)
    figures = [Figure("mixed, batch 1: threshold / best fixed length", gain, "x", "higher", 1.1, None, best)]
    figures += [Figure(f"mixed, batch 1: {name}", round(value, 1), "tokens/s", "higher") for name, value in found.items()]
    return figures
