"""Engines that take turns at the same requests, and what of their times a noisy machine cannot change.

A group of requests is answered by each engine in turn before the next group begins: off, on, off. So a machine that gets slower
or faster meanwhile does so for all of them, and the two of "off" say how far apart equals are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from benchmarks.spec.runs import Answered, Task, answer
from engine.engine import Engine

Run = Callable[[Engine, Sequence[Task]], Answered]
Seconds = list[list[float]]
"""By group, of its runs."""


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
        """Seconds of the outer one ÷ those of the inner one: how much faster the inner one is."""
        return (typical(self.before) + typical(self.after)) / 2 / typical(self.between)

    @property
    def noise(self) -> float:
        """The same ratio of the outer one to itself."""
        return typical(self.before) / typical(self.after)


def take_turns(outer: Engine, inner: Engine, groups: Sequence[Sequence[Task]], rounds: int, run: Run = answer) -> Turns:
    """Raises AssertionError when they answer differently."""
    turns = Turns([[] for _ in groups], [[] for _ in groups], [[] for _ in groups])
    for _ in range(rounds):
        for number, group in enumerate(groups):
            first, middle, last = run(outer, group), run(inner, group), run(outer, group)
            assert first.outputs == middle.outputs == last.outputs, "speculation changed an answer"
            turns.before[number].append(first.decode_s)
            turns.between[number].append(middle.decode_s)
            turns.after[number].append(last.decode_s)
    return turns


def warm(engine: Engine, tasks: Sequence[Task]) -> None:
    """Their prompts lie in the prefix cache from now on: what is timed then is decoding, all of a batch from the first step."""
    for task in tasks:
        answer(engine, [task.shorter(1)])


def rates(engines: Mapping[str, Engine], groups: Sequence[Sequence[Task]]) -> dict[str, float]:
    """Tokens per second of each engine over all groups; they take turns at every group, in an order that is turned each time.
    Raises AssertionError when two of them answer differently."""
    seconds, num_tokens = dict.fromkeys(engines, 0.0), 0
    for number, group in enumerate(groups):
        names = list(engines) if number % 2 == 0 else [*engines][::-1]
        answers = {name: answer(engines[name], group) for name in names}
        first, *others = answers.values()
        assert all(other.outputs == first.outputs for other in others), "engines answer differently"
        num_tokens += first.num_tokens
        for name, answered in answers.items():
            seconds[name] += answered.decode_s
    return {name: num_tokens / seconds[name] for name in engines}
