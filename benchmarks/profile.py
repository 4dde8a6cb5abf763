"""`make bench-profile`: where the time of an engine's step goes, part by part, as `pdmesh profile` shows it."""

import statistics

from benchmarks.harness import Figure, parser_of, say, write
from pdmesh.doctor.step_profile import PYTHON, Case, StepProfile, StepProfiler
from pdmesh.engine.config import EngineConfig
from pdmesh.models.registry import ensure_model

CASES = (Case(1, 160), Case(16, 160), Case(0, 512))
STEPS, ROUNDS = 64, 5


def figures_of(profiles: list[StepProfile]) -> list[Figure]:
    """Of one case's rounds: the median of each part, and of Python's share."""
    name = profiles[0].case.name
    parts = {part: statistics.median(profile.parts[part] for profile in profiles) for part in profiles[0].parts}
    share = statistics.median(profile.parts[PYTHON] / profile.wall_ns for profile in profiles)
    return [
        Figure(f"{name}: step", statistics.median(profile.wall_ns for profile in profiles) / 1e3, "us", "lower"),
        *(Figure(f"{name}: {part}", value / 1e3, "us", "lower") for part, value in parts.items()),
        Figure(f"{name}: Python's share of the step", share, "of 1", "lower"),
    ]


def main() -> None:
    profiler = StepProfiler(EngineConfig(model=str(ensure_model("smollm2-135m-instruct", say))), CASES, STEPS, say)
    rounds = []
    for number in range(ROUNDS):
        rounds.append([profiler.run(case) for case in CASES])
        for profile in rounds[-1]:
            say(f"round {number + 1}/{ROUNDS}  {profile.case.name}: {profile.wall_ns / 1e3:.0f} us")
    figures = [figure for profiles in zip(*rounds, strict=True) for figure in figures_of(list(profiles))]
    write("profile", figures, model="SmolLM2-135M-Instruct", numeric_mode=profiler.numeric_mode)


if __name__ == "__main__":
    parser_of("benchmarks.profile", __doc__).parse_args()
    main()
