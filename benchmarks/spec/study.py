"""Which drafts pay: for each proposer what a verified draft brings and what it costs, with drafts of LENGTH tokens whatever they
cost. (What the policy makes of them: gain.py.) Prints a table for docs/speculation.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Bench, Task, answer, guessed, of_length
from benchmarks.spec.tokens import Guess
from pdmesh.engine.engine import Engine
from pdmesh.engine.speculation.stats import SpeculationStats

LENGTH = 4
LAYERS = (8, 15, 20, 24)
KINDS = ("prose", "copying")
NUM_TASKS = 4
NUM_TOKENS = 64
HEAD = (
    f"| workload | proposer | speed-up, {LENGTH} tokens always | tokens per row-step | kept by depth | drafting, ms per step |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Row:
    """A row-step is a sequence's part of a step; `by_depth`: the share of the tokens verified there that was kept."""

    kind: str
    name: str
    speed_up: float
    tokens_per_row: float
    by_depth: tuple[float, ...]
    drafting_ms: float

    def __str__(self) -> str:
        return (
            f"| {self.kind} | `{self.name}` | {self.speed_up:.2f} | {self.tokens_per_row:.2f} "
            f"| {self.depths} | {self.drafting_ms:.2f} |"
        )

    @property
    def depths(self) -> str:
        return " ".join(f"{share:.2f}" for share in self.by_depth) or "-"

    def figures(self) -> Iterator[Figure]:
        where = f"study, {self.kind}, {self.name}"
        yield Figure(f"{where}: speed-up with drafts of {LENGTH}", round(self.speed_up, 3), "x", "higher")
        yield Figure(f"{where}: tokens of a row-step", round(self.tokens_per_row, 3), "tokens", "higher")
        yield Figure(f"{where}: kept by depth", self.depths, "of the tokens verified there", "higher")
        yield Figure(f"{where}: drafting", round(self.drafting_ms, 3), "ms of a step", "lower")


def guesses_to_study(guesses: Sequence[Guess]) -> list[Guess]:
    """Those that guess alone; of the model's own layers several numbers."""
    alone = [guess for guess in guesses if "," not in guess.speculation and guess.speculation not in ("auto", "self_draft")]
    layers = [Guess(f"self_draft, {count} layers", "self_draft", {"self_draft_layers": count}) for count in LAYERS]
    return [*alone, *layers]


def study_figures(bench: Bench, workloads: Mapping[str, Sequence[Task]], guesses: Sequence[Guess]) -> Iterator[Figure]:
    rows = []
    for kind in KINDS:
        tasks = [task.shorter(NUM_TOKENS) for task in workloads[kind][:NUM_TASKS]]
        for guess in guesses:
            rows.append(
                _row(kind, guess.name, bench, bench.guessing(guess.speculation, **of_length(LENGTH), **guess.settings), tasks)
            )
            say(str(rows[-1]))
            yield from rows[-1].figures()
    say("\n".join([HEAD, *map(str, rows)]))


def _row(kind: str, name: str, bench: Bench, engine: Engine, tasks: Sequence[Task]) -> Row:
    plain, off_s, on_s = bench.engine(), 0.0, 0.0
    for task in tasks:
        off, on = answer(plain, [task]), answer(engine, [task])
        assert off.outputs == on.outputs, f"{name} changed an answer"
        off_s, on_s = off_s + off.decode_s, on_s + on.decode_s
    stats = guessed(engine)
    return Row(
        kind,
        name,
        off_s / on_s,
        stats.num_tokens / stats.num_rows,
        kept_by_depth(stats),
        1e3 * stats.drafting_s / stats.num_rows,
    )


def kept_by_depth(stats: SpeculationStats) -> tuple[float, ...]:
    """Of the tokens verified at each depth the share that was kept, all proposers together, as deep as some were verified."""
    each = list(stats.by_proposer.values())
    verified = [sum(counts) for counts in zip(*(one.verified for one in each), strict=True)]
    kept = [sum(counts) for counts in zip(*(one.kept for one in each), strict=True)]
    return tuple(some / most for some, most in zip(kept, verified, strict=True) if most)
