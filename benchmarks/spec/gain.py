"""Item 2: how much faster an answer comes at batch 1, by what is asked for and who guesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import mean

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Answering, Bench, Task, answer, counts, guessed, of_length, together
from pdmesh.engine.engine import Engine
from pdmesh.engine.speculation.stats import SpeculationStats
from tests.equality.speculation import Guess

# Which drafts pay: for each proposer what a verified draft brings and what it costs, with drafts of LENGTH tokens whatever they
# cost. (What the policy makes of them: gain.py.) Prints a table for docs/speculation.md.


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


NUM_COPYING, NUM_PROSE = 16, 10
"""Tasks, of prose greedy and sampled ones each. They differ: an engine learns from those before, as in service, but meets none
twice."""
GOALS = {
    ("copying", "prompt_lookup"): 2.5,
    ("prose", "auto"): 1.0,
    ("prose", "heads"): 1.2,
}


class Timed:
    """One way to guess: seconds over all tasks, with its engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.decode_s = 0.0

    @property
    def told(self) -> str:
        """Tokens of a step, and what of the verified tokens was kept."""
        stats = guessed(self.engine)
        verified, kept = counts(stats)
        share = f"{100 * kept / verified:.0f} % kept" if verified else "nothing verified"
        return f"{stats.num_tokens / max(1, stats.num_rows):.2f} tokens a step, {share}"


def gain_figures(bench: Bench, workloads: Mapping[str, Sequence[Task]], guesses: Sequence[Guess]) -> Iterator[Figure]:
    """Seconds without ÷ with speculation. Prose is told drawn in both ways, and together."""
    gains: dict[str, dict[str, tuple[float, float]]] = {}
    kinds = tasks_of(workloads)
    for kind, tasks in kinds.items():
        off_s, ways = _measured(bench, tasks, guesses, kind)
        gains[kind] = {name: (off_s, way.decode_s) for name, way in ways.items()}
        for name, way in ways.items():
            yield _figure(kind, name, off_s / way.decode_s, way.told)
    for name, (off_s, on_s) in gains["prose, greedy"].items():
        more_off_s, more_on_s = gains["prose, sampled"][name]
        yield _figure("prose", name, (off_s + more_off_s) / (on_s + more_on_s), "greedy and sampled")
    yield copied_figure(bench, kinds["copying"])


def tasks_of(workloads: Mapping[str, Sequence[Task]]) -> dict[str, Sequence[Task]]:
    """What is measured, by kind."""
    prose = workloads["prose"]
    return {
        "copying": workloads["copying"][:NUM_COPYING],
        "prose, greedy": [task for task in prose if task.params.greedy][:NUM_PROSE],
        "prose, sampled": [task for task in prose if not task.params.greedy][:NUM_PROSE],
    }


def _measured(bench: Bench, tasks: Sequence[Task], guesses: Sequence[Guess], kind: str) -> tuple[float, dict[str, Timed]]:
    """Seconds without, and of each way: all take turns at every step, between two without."""
    off, again = Timed(bench.engine()), Timed(bench.engine())
    ways = {guess.name: Timed(bench.guessing(guess.speculation, **guess.settings)) for guess in guesses}
    for number, task in enumerate(tasks):
        answer_in_turns([off, *ways.values(), again], task)
        off_s = (off.decode_s + again.decode_s) / 2
        so_far = "  ".join(f"{name} {off_s / way.decode_s:.2f}x" for name, way in ways.items())
        say(f"{kind} {number + 1}/{len(tasks)}: {so_far}")
    return off_s, ways


def answer_in_turns(timed: Sequence[Timed], task: Task) -> None:
    """Raises AssertionError when two of them answer differently."""
    answers = together([Answering(each.engine, [task]) for each in timed])
    assert all(other.outputs == answers[0].outputs for other in answers), "speculation changed an answer"
    for each, answered in zip(timed, answers, strict=True):
        each.decode_s += answered.decode_s


def _figure(kind: str, name: str, value: float, told: str) -> Figure:
    return Figure(f"{kind}, batch 1: {name} / none ({told})", round(value, 3), "x", "higher", GOALS.get((kind, name)))


def copied_figure(bench: Bench, tasks: Sequence[Task]) -> Figure:
    """Whether the model does what the copying tasks ask for."""
    engine = bench.engine()
    shares = [likeness(task.right, answer(engine, [task]).outputs[0].token_ids) for task in tasks]
    name = "copying: likeness of the model's answer and the right one (difflib's ratio over tokens, mean)"
    return Figure(name, round(mean(shares), 3), "of 1", "higher")


def likeness(right: Sequence[int], got: Sequence[int]) -> float:
    """1: the same tokens; 0: none in common."""
    return SequenceMatcher(None, right, got, autojunk=False).ratio()
