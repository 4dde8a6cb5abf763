"""Item 5: what verifying several tokens costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Bench
from pdmesh.engine.engine import Engine
from pdmesh.engine.speculation.calibration import run_step

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
CONTEXTS = (64, 256, 1024)


def measure_rows(bench: Bench, engine: Engine, rows: Sequence[int], context: int, rounds: int) -> dict[int, float]:
    """Seconds of a forward pass and its draws, by tokens verified, all at one sequence's end; medians of interleaved runs."""
    taken: dict[int, list[float]] = {count: [] for count in rows}
    model, sampler, kv = bench.loaded.model, engine.sampler, engine.kv.tensor
    for number in range(rounds + 1):
        for count in rows:
            started_s = time.perf_counter()
            run_step(model, sampler, kv, count, context)
            if number:
                taken[count].append(time.perf_counter() - started_s)
    return {count: median(times) for count, times in taken.items()}


def cost_figures(bench: Bench, rounds: int = 40) -> list[Figure]:
    """t(verify k) ÷ t(1)."""
    engine = bench.engine()
    engine.kv.reach(max(CONTEXTS) // bench.config.block_size)
    figures = []
    for context in CONTEXTS:
        seconds = measure_rows(bench, engine, ROWS, context, rounds)
        say(f"context {context}: " + "  ".join(f"{r}: {1e3 * s:.2f} ms ({s / seconds[1]:.2f})" for r, s in seconds.items()))
        for count in ROWS[1:]:
            goal = 1.6 if count == 8 else None
            name = f"t(verify {count}) / t(1), context {context}"
            figures.append(Figure(name, round(seconds[count] / seconds[1], 3), "x", "lower", goal))
    return figures
