"""Quantiles of durations that were counted in classes are off by no more than half a class."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.planning.capacity_load import LEAST_S, NUM_CLASSES, RELATIVE_ERROR, class_of, middle_s, quantile_s

SECONDS = st.floats(min_value=LEAST_S, max_value=1000.0)


@given(SECONDS)
def test_a_duration_is_near_the_middle_of_its_class(seconds: float) -> None:
    assert abs(middle_s(class_of(seconds)) / seconds - 1) <= RELATIVE_ERROR + 1e-6


def test_what_is_too_short_or_too_long_is_in_the_outermost_classes() -> None:
    assert class_of(0.0) == class_of(-1.0) == class_of(1e-9) == 0
    assert class_of(1e9) == class_of(math.inf) == NUM_CLASSES - 1


@given(st.lists(SECONDS, min_size=1, max_size=60), st.lists(SECONDS, max_size=60), st.floats(0.01, 1.0))
def test_the_quantile_of_two_sums_is_that_of_all(first: list[float], second: list[float], q: float) -> None:
    counts = Counter(map(class_of, first)) + Counter(map(class_of, second))
    every = sorted(first + second)
    expected = every[math.ceil(q * len(every)) - 1]
    found = quantile_s(counts, q)
    assert found is not None and abs(found / expected - 1) <= RELATIVE_ERROR + 1e-6


def test_nothing_has_no_quantile() -> None:
    assert quantile_s({}, 0.5) is None
    assert quantile_s({3: 0}, 0.5) is None
