"""Every kernel of the other parts, compiled by all cores: one after the other they would take longer than the whole run."""

from __future__ import annotations

import time
from collections import Counter

from benchmarks.gpu.compiler import Launch, compiled, recorded
from benchmarks.gpu.context import Context
from benchmarks.gpu.rehearsal import scenes
from benchmarks.harness import Figure


def run(context: Context) -> None:
    began = time.monotonic()
    launches = _launches(context)
    context.note(f"{len(launches)} kernels were asked for in {time.monotonic() - began:.1f} s")
    results = []
    for result in compiled(launches, context.deadline.left_s, builds_launchers=context.device == "cuda"):
        results.append(result)
        if result.error:
            context.note(f"{result.name} was not compiled ahead: {result.error}")
    new = [result for result in results if result.is_new]
    slowest = max(results, key=lambda result: result.seconds, default=None)
    if slowest is not None:
        context.note(f"the slowest was {slowest.name}: {slowest.seconds:.1f} s of {sum(each.seconds for each in results):.1f} s")
    if len(results) < len(launches):
        context.note(f"left out, as the part's time was used up: {len(launches) - len(results)} kernels")
    context.note(f"compiled: {_words(Counter(result.name for result in new))}; {len(results) - len(new)} were there")
    context.add(Figure("kernels compiled ahead", float(len(results)), "kernels", "higher", limit=float(len(launches))))
    context.add(Figure("time to compile them", time.monotonic() - began, "s", "lower"))


def _launches(context: Context) -> list[Launch]:
    """A scene that breaks is told of and left to its part."""
    with recorded(context.capability) as launches:
        for name, scene in scenes(context):
            try:
                scene()
            except Exception as error:  # noqa: BLE001 - its part will say so
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                context.note(f"not all of it compiled ahead: {name}: {why}")
    return launches.ordered()


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"
