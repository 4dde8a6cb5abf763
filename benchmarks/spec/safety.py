"""Item 3: `--speculation auto` never loses, at any batch size and for any workload, because it stops by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Answering, Arriving, Bench, Refilled, Task, answer, as_many, groups, of_length, together
from pdmesh.engine.engine import Engine
from pdmesh.engine.speculation.calibration import run_step

# Engines that answer the same requests, a step of each in turn, and what of their times a noisy machine cannot change.
#
# A step takes milliseconds, and the machine gets slower or faster for longer than that: whatever happens meets all of the
# engines. Two of them are equal, and say how far apart equals are.


Begin = Callable[[Engine, Sequence[Task]], Answering]
Seconds = list[list[float]]
"""Of a token, by group, of its runs."""


def typical(seconds: Seconds) -> float:
    """Of all groups once: each counts with the mean of the faster half of its runs. Others on the machine only make runs slower,
    so the slower half says more of them than of the engine; the least alone would say most of luck."""
    return sum(mean(sorted(runs)[: (len(runs) + 1) // 2]) for runs in seconds)


@dataclass(frozen=True)
class Turns:
    """Of two kinds of engine, the one before and behind the other in each turn."""

    before: Seconds = field(default_factory=list)
    between: Seconds = field(default_factory=list)
    after: Seconds = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Seconds per token of the outer ones ÷ those of the inner one: how much faster the inner one is."""
        return (typical(self.before) + typical(self.after)) / 2 / typical(self.between)

    @property
    def noise(self) -> float:
        """The same ratio of the outer ones to each other."""
        return typical(self.before) / typical(self.after)

    @property
    def ratios(self) -> list[float]:
        """Of the turns one by one, ascending."""
        rounds = zip(*(zip(*runs, strict=True) for runs in (self.before, self.between, self.after)), strict=True)
        return sorted((sum(before) + sum(after)) / 2 / sum(between) for before, between, after in rounds)


def take_turns(
    outer: tuple[Engine, Engine], inner: Engine, groups: Sequence[Sequence[Task]], rounds: int, begin: Begin = Answering
) -> Turns:
    """`outer`: two that are equal. Raises AssertionError when they answer differently."""
    turns = Turns([[] for _ in groups], [[] for _ in groups], [[] for _ in groups])
    for _ in range(rounds):
        for number, group in enumerate(groups):
            first, middle, last = together([begin(engine, group) for engine in (outer[0], inner, outer[1])])
            assert first.outputs == middle.outputs == last.outputs, "speculation changed an answer"
            turns.before[number].append(first.s_per_token)
            turns.between[number].append(middle.s_per_token)
            turns.after[number].append(last.s_per_token)
    return turns


def warm(engine: Engine, tasks: Sequence[Task]) -> None:
    """Their prompts lie in the prefix cache from now on: what is timed then is decoding, all of a batch from the first step."""
    for task in tasks:
        answer(engine, [task.shorter(1)])


def rates(engines: Mapping[str, Engine], groups: Sequence[Sequence[Task]]) -> dict[str, float]:
    """Tokens per second of each engine over all groups. Raises AssertionError when two of them answer differently."""
    seconds, num_tokens = dict.fromkeys(engines, 0.0), 0
    for group in groups:
        answers = together([Answering(engine, group) for engine in engines.values()])
        assert all(other.outputs == answers[0].outputs for other in answers), "engines answer differently"
        num_tokens += answers[0].num_tokens
        for name, answered in zip(engines, answers, strict=True):
            seconds[name] += answered.decode_s
    return {name: num_tokens / seconds[name] for name in engines}


# Item 4: what it is worth that a draft ends where its chance no longer pays, against drafts of one length.


LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
THRESHOLD_TASKS = {1: 12, 8: 16}
"""By batch."""
THRESHOLD_TOKENS = 128
THRESHOLD = "threshold"
THRESHOLD_GOAL = 1.1


def threshold_figures(bench: Bench, tasks: Sequence[Task], rounds: int) -> Iterator[Figure]:
    """The policy's lengths ÷ the best fixed one over the same mixed tasks, with the same proposers."""
    for batch, count in THRESHOLD_TASKS.items():
        some = [task.shorter(THRESHOLD_TOKENS) for task in as_many(tasks, count)]
        found = _threshold_measured(bench, list(groups(some, batch)), rounds)
        yield from _threshold_figures(f"mixed, batch {batch}", found)


def _threshold_measured(bench: Bench, some: Sequence[Sequence[Task]], rounds: int) -> dict[str, float]:
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


def _threshold_figures(kind: str, found: dict[str, float]) -> Iterator[Figure]:
    best = max((name for name in found if name != THRESHOLD), key=found.__getitem__)
    gain = round(found[THRESHOLD] / found[best], 3)
    yield Figure(f"{kind}: threshold / best fixed length", gain, "x", "higher", THRESHOLD_GOAL, None, best)
    for name, value in found.items():
        yield Figure(f"{kind}: {name}", round(value, 1), "tokens/s", "higher")


# Item 5: what verifying several tokens costs.


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


KINDS = ("copying", "prose", "mixed", "penalties, min-p", "logprobs", "JSON schema")
BATCHES = (1, 4, 16, 32)
NUM_TASKS: Mapping[int, int] = {1: 8, 4: 32, 16: 48, 32: 64}
"""By batch."""
NUM_TOKENS = 64
"""Of an answer at most."""
LONGEST_ARRIVING, ARRIVING_TASKS = 200, 3
"""Tokens of a prompt; and tasks, so many times as many as there are at a time."""
GOAL = 0.98
"""Of every kind at every batch, but where more is asked for."""
MORE = {("copying", 1): 2.5, ("mixed", 1): 1.4}


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
            yield from _figures(f"{kind}, batch {batch}", found, MORE.get((kind, batch), GOAL))


def arriving_figures(bench: Bench, tasks: Sequence[Task], rounds: int) -> Iterator[Figure]:
    """Prompts come, and are computed, beside sequences that decode."""
    on = bench.guessing("auto", prefix_caching=False)
    off = (bench.engine(prefix_caching=False), bench.engine(prefix_caching=False))
    some = [task.shorter(NUM_TOKENS) for task in tasks if len(task.prompt) <= LONGEST_ARRIVING]
    lengths = [len(answer(off[0], [task]).outputs[0].token_ids) for task in some]
    short = [task.shorter(length) for task, length in zip(some, lengths, strict=True) if length > 1]
    for batch in BATCHES:
        found = take_turns(off, on, [as_many(short, max(8, ARRIVING_TASKS * batch))], rounds, partial(Arriving, batch=batch))
        yield from _figures(f"prompts arriving, about {batch} at a time", found)


def _figures(name: str, turns: Turns, goal: float = GOAL) -> list[Figure]:
    ratios = turns.ratios
    say(f"{name}: {turns.ratio:.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f} (none to itself: {turns.noise:.3f})")
    return [
        Figure(f"{name}: on / off", round(turns.ratio, 3), "x", "higher", goal),
        Figure(f"{name}: on / off, least of {len(ratios)} turns", round(ratios[0], 3), "x", "higher"),
        Figure(f"{name}: on / off, greatest of {len(ratios)} turns", round(ratios[-1], 3), "x", "higher"),
        Figure(f"{name}: off / off, what is noise", round(turns.noise, 3), "x", "higher"),
    ]
