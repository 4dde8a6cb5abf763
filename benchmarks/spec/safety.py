"""Item 3: `--speculation auto` never loses, at any batch size and for any workload, because it stops by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Arriving, Bench, Refilled, Task, as_many
from benchmarks.spec.turns import Turns, take_turns, warm

KINDS = ("copying", "prose", "mixed", "penalties, min-p", "logprobs", "JSON schema")
BATCHES = (1, 4, 16, 32)
NUM_TASKS: Mapping[int, int] = {1: 8, 4: 32, 16: 48, 32: 64}
"""By batch."""
NUM_TOKENS = 64
"""Of an answer at most."""
LONGEST_ARRIVING = 200
"""Tokens of a prompt."""
GOAL = 0.98


def safety_figures(bench: Bench, workloads: Mapping[str, Sequence[Task]], rounds: int) -> Iterator[Figure]:
    """Speculation ÷ none, each with the ratio of none to itself: what of it is noise."""
    off = (bench.engine(), bench.engine())
    for kind in KINDS:
        on = bench.guessing("auto")
        tasks = [task.shorter(NUM_TOKENS) for task in as_many(workloads[kind], max(NUM_TASKS.values()))]
        for engine in (*off, on):
            warm(engine, tasks)
        for batch in BATCHES:
            found = take_turns(off, on, [tasks[: NUM_TASKS[batch]]], rounds, partial(Refilled, batch=batch))
            yield from _figures(f"{kind}, batch {batch}", found)


def arriving_figures(bench: Bench, tasks: Sequence[Task], rounds: int) -> Iterator[Figure]:
    """Prompts come, and are computed, beside sequences that decode."""
    on = bench.guessing("auto", prefix_caching=False)
    off = (bench.engine(prefix_caching=False), bench.engine(prefix_caching=False))
    short = [task.shorter(NUM_TOKENS) for task in tasks if len(task.prompt) <= LONGEST_ARRIVING]
    for batch in BATCHES:
        found = take_turns(off, on, [as_many(short, max(8, batch))], rounds, partial(Arriving, batch=batch))
        yield from _figures(f"prompts arriving, about {batch} at a time", found)


def _figures(name: str, turns: Turns) -> list[Figure]:
    say(f"{name}: {turns.ratio:.3f} (none to itself: {turns.noise:.3f})")
    return [
        Figure(f"{name}: on / off", round(turns.ratio, 3), "x", "higher", GOAL),
        Figure(f"{name}: off / off, what is noise", round(turns.noise, 3), "x", "higher"),
    ]
