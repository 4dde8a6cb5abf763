"""Item 2: how much faster an answer comes at batch 1, by what is asked for and who guesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from statistics import mean

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Answering, Bench, Task, answer, counts, guessed, together
from benchmarks.spec.tokens import Guess
from pdmesh.engine.engine import Engine

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
