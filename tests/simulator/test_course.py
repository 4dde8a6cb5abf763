"""Steps that vary: around the same mean, single ones by as much as was said, many together by less."""

import math
import statistics
from collections.abc import Iterable

import pytest

from pdmesh.simulator.workers.batch import StepsUnderWay, StepTimes

STEP_S, LASTS_S = 0.01, 0.2


def factors(num_steps: int, *, noise: float = 0.3, seed: str = "0/w", num: int = 4000) -> list[float]:
    times, listed = StepTimes(0.0, noise, LASTS_S, seed), []
    for _ in range(num):
        course = StepsUnderWay(0.0, num_steps, STEP_S)
        times.apply(course)
        listed.append(course.first_s / STEP_S)
    return listed


def spread(values: Iterable[float]) -> float:
    return statistics.pstdev(math.log(value) for value in values)


def test_single_steps_vary_as_was_said_around_the_same_mean() -> None:
    single = factors(1)
    assert statistics.fmean(single) == pytest.approx(1.0, abs=0.02)
    assert spread(single) == pytest.approx(0.3, rel=0.05)


def test_many_steps_together_vary_less() -> None:
    lasting = factors(20)  # as long as a disturbance
    assert statistics.fmean(lasting) == pytest.approx(1.0, abs=0.02)
    assert spread(lasting) == pytest.approx(0.3 * math.sqrt(2 / math.e), rel=0.05)
    assert spread(factors(2000)) < 0.05


def test_equal_seeds_are_equal_and_others_are_not() -> None:
    assert factors(1, num=5) == factors(1, num=5)
    assert factors(1, num=5) != factors(1, num=5, seed="1/w")


def test_all_steps_of_a_course_take_more_and_what_is_between_them_does_not_vary() -> None:
    course = StepsUnderWay(0.0, 8, STEP_S, more_s=1e-4)
    StepTimes(2e-3, 0.0, LASTS_S, "").apply(course)
    assert course.lasts_s(8) == pytest.approx(8 * (STEP_S + 2e-3) + 28e-4)
    assert course.steps_by(course.lasts_s(5) + 1e-6) == 5
