"""`make bench-profile`: where the time of an engine's step goes, part by part, each beside its limit, as `pdmesh profile` shows.

SmolLM2-135M, and random weights in the shape of Llama 3.2 1B; some three minutes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import Figure, parser_of, say, show, write
from benchmarks.peers.shapes import LLAMA_1B
from benchmarks.peers.weights import Subject, random
from pdmesh.doctor.step_profile import Case, StepProfile, StepProfiler
from pdmesh.engine.config import EngineConfig
from pdmesh.models.catalogue import SMOLLM2

ACCOUNTED_GOAL, PYTHON_GOAL = 0.95, 0.05


@dataclass(frozen=True)
class Subjects:
    """A model whose steps are measured: its name in figures, where it is, and how many steps of each kind."""

    label: str
    subject: Subject
    cases: tuple[Case, ...]
    steps: int
    rounds: int


ALL = (
    Subjects("", Subject(SMOLLM2.name), (Case(1, 160), Case(16, 160), Case(0, 512)), steps=64, rounds=5),
    Subjects("1B shape, ", random(LLAMA_1B), (Case(1, 160), Case(16, 160), Case(0, 512)), steps=16, rounds=5),
)


def figures_of(label: str, profiles: Sequence[StepProfile]) -> list[Figure]:
    """Return those of one case's rounds: the median of each part beside its limit, of what the parts explain, and of Python's
    share."""
    name, limits = f"{label}{profiles[0].case.name}", profiles[0].limits
    parts = {part: statistics.median(profile.parts[part] for profile in profiles) for part in profiles[0].parts}
    share = statistics.median(profile.python_share for profile in profiles)
    accounted = statistics.median(profile.accounted_share for profile in profiles)
    # Of the case for which it was asked: a prompt's step is so long that Python is nothing beside it.
    python_goal = PYTHON_GOAL if profiles[0].case.num_seqs == 16 else None
    return [
        Figure(f"{name}: step", statistics.median(profile.wall_ns for profile in profiles) / 1e3, "us", "lower"),
        *(Figure(f"{name}: {part}", value / 1e3, "us", "lower", limit=_us(limits.get(part))) for part, value in parts.items()),
        Figure(f"{name}: named parts, of a step without a clock inside", accounted, "of 1", "higher", goal=ACCOUNTED_GOAL),
        Figure(f"{name}: Python's share of the step", share, "of 1", "lower", goal=python_goal),
    ]


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3


def measure(subjects: Subjects, *, quick: bool) -> tuple[list[Figure], str]:
    """Return the figures of one model, and the numbers that it was computed in."""
    steps, rounds = (8, 1) if quick else (subjects.steps, subjects.rounds)
    folder = subjects.subject.folder(say)
    profiler = StepProfiler(EngineConfig(model=str(folder)), subjects.cases, steps, say)
    found: list[list[StepProfile]] = []
    for number in range(rounds):
        found.append([profiler.run(case) for case in subjects.cases])
        for profile in found[-1]:
            say(f"round {number + 1}/{rounds}  {subjects.label}{profile.case.name}: {profile.wall_ns / 1e3:.0f} us")
    figures = [figure for profiles in zip(*found, strict=True) for figure in figures_of(subjects.label, list(profiles))]
    return figures, profiler.numeric_mode


def main() -> None:
    parser = parser_of("benchmarks.profile", __doc__)
    parser.add_argument("--quick", action="store_true", help="to see that all works, in short; no results are written")
    quick = parser.parse_args().quick
    figures, modes = [], []
    for subjects in ALL:
        own, mode = measure(subjects, quick=quick)
        figures += own
        modes.append(mode)
    if quick:
        show(figures)
    else:
        models = "SmolLM2-135M-Instruct; random weights in the shape of Llama 3.2 1B"
        write("profile", figures, model=models, numeric_mode=", ".join(dict.fromkeys(modes)))


if __name__ == "__main__":
    main()
