"""Distributions from text."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.loadtest import arrivals
from pdmesh.loadtest.arrivals import KINDS, Distribution


@given(st.sampled_from(sorted(KINDS)), st.floats(0, 1000), st.floats(0, 3), st.integers(0, 99))
def test_draws_are_never_negative_and_counts_at_least_one(kind: str, first: float, second: float, seed: int) -> None:
    parameters = (first, first + second)[: len(KINDS[kind])] if kind == "uniform" else (first, second)[: len(KINDS[kind])]
    distribution = Distribution(kind, parameters)
    assert distribution.draw(random.Random(seed)) >= 0
    assert distribution.draw_count(random.Random(seed)) >= 1


@pytest.mark.parametrize(
    ("text", "mean"),
    [("64", 64), ("fixed:64", 64), ("uniform:10:20", 15), ("normal:100:10", 100), ("exponential:30", 30)],
)
def test_means(text: str, mean: float) -> None:
    rng, distribution = random.Random(3), arrivals.parse(text)
    assert statistics.mean(distribution.draw(rng) for _ in range(20_000)) == pytest.approx(mean, rel=0.03)


def test_lognormal_has_its_median() -> None:
    rng, distribution = random.Random(3), arrivals.parse("lognormal:200:0.5")
    assert statistics.median(distribution.draw(rng) for _ in range(20_000)) == pytest.approx(200, rel=0.03)


def test_uniform_counts_reach_both_ends() -> None:
    rng = random.Random(1)
    assert {arrivals.parse("uniform:2:4").draw_count(rng) for _ in range(200)} == {2, 3, 4}


@pytest.mark.parametrize(
    "text", ["", "normal", "normal:1", "normal:1:2:3", "fixed:-1", "fixed:inf", "zipf:2", "uniform:4:2", "x"]
)
def test_what_is_no_distribution_says_what_would_be_right(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|is not a distribution|must not exceed"):
        arrivals.parse(text)


@given(st.sampled_from(["64", "uniform:10:20", "normal:100:10.5", "lognormal:200:0.5", "exponential:0.25"]))
def test_text_and_back(text: str) -> None:
    assert arrivals.parse(str(arrivals.parse(text))) == arrivals.parse(text)
