"""Engines that answer the same requests, a step of each in turn, and what of their times a noisy machine cannot change.

A step takes milliseconds, and the machine gets slower or faster for longer than that: whatever happens meets all of the engines.
Two of them are equal, and say how far apart equals are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from benchmarks.spec.runs import Answering, Task, answer, together
from pdmesh.engine.engine import Engine

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
