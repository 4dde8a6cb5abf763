"""Who was given less than its share of late: against the definition, and the cases that matter."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.flow_control.fairness import BELOW, WINDOW_TOKENS, RecentUse, Use

Charges = list[tuple[int, float]]
WEIGHTS = (1.0, 1.0, 4.0)


def after(charges: Charges, weights: tuple[float, ...] = WEIGHTS) -> tuple[RecentUse, list[Use]]:
    recent, uses = RecentUse(), [Use() for _ in weights]
    for tenant, tokens in charges:
        recent.charge(uses[tenant], tokens, weights[tenant])
    return recent, uses


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(1.0, 40_000.0)), min_size=1, max_size=40))
def test_it_is_the_definition(charges: Charges) -> None:
    recent, uses = after(charges)
    levels, total = [0.0, 0.0, 0.0], 0.0
    later = 0.0
    for tenant, tokens in reversed(charges):
        levels[tenant] += tokens * math.exp(-later / WINDOW_TOKENS) / WEIGHTS[tenant]
        later += tokens
    total = sum(level * weight for level, weight in zip(levels, WEIGHTS, strict=True))
    typical = sum(level * level * weight for level, weight in zip(levels, WEIGHTS, strict=True)) / total
    for use, weight, level in zip(uses, WEIGHTS, levels, strict=True):
        if abs(level - BELOW * typical) > 1e-6 * typical:
            assert recent.is_below(use, weight) == (level < BELOW * typical)


@pytest.mark.parametrize(
    ("charges", "below"),
    [
        ([(0, 500.0)] * 50, [False, True, True]),
        ([(0, 500.0), (1, 500.0)] * 50, [False, False, True]),
        ([(0, 500.0)] * 3 * 50 + [(1, 500.0)] * 50, [True, False, True]),  # what was long ago counts little
        ([(0, 500.0), (0, 500.0), (0, 500.0), (1, 500.0)] * 50, [False, True, True]),
        ([(0, 500.0), (2, 500.0), (2, 500.0), (2, 500.0), (2, 500.0)] * 50, [False, True, False]),  # four times the weight
    ],
)
def test_who_is_below_its_share(charges: Charges, below: list[bool]) -> None:
    recent, uses = after(charges)
    assert [recent.is_below(use, weight) for use, weight in zip(uses, WEIGHTS, strict=True)] == below


def test_a_burst_does_not_make_a_modest_tenant_greedy() -> None:
    recent, uses = after([(0, 500.0)] * 60 + [(1, 500.0)] * 3)
    assert recent.is_below(uses[1], 1.0)
    assert not recent.is_below(uses[0], 1.0)


def test_nobody_was_given_anything() -> None:
    assert not RecentUse().is_below(Use(), 1.0)
