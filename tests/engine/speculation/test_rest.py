"""Nobody is asked where looking is not worth what it takes, for longer and longer; once something is found, at every step."""

from __future__ import annotations

from itertools import pairwise

from pdmesh.engine.speculation.speculator import LONGEST_REST, LOOKING, Rest

PRICE = 0.02


def asked(rest: Rest, num_steps: int, found: frozenset[int] = frozenset(), price: float = PRICE) -> list[int]:
    """Steps at which somebody was asked; from those of `found` on something was worth a step."""
    steps = []
    for step in range(num_steps):
        if not rest.is_on():
            steps.append(step)
            rest.saw(float(any(step >= first for first in found)), price)
    return steps


def gaps(steps: list[int]) -> list[int]:
    return [after - before - 1 for before, after in pairwise(steps)]


def test_rests_grow_to_the_longest() -> None:
    found = gaps(asked(Rest(LONGEST_REST), 200))
    rests = found[found.index(1) :]
    assert not any(found[: found.index(1)])
    assert rests[:5] == [1, 2, 4, 8, 8]


def test_the_dearer_looking_is_the_longer() -> None:
    assert max(gaps(asked(Rest(LONGEST_REST), 400, price=0.2))) == round(0.2 / LOOKING)


def test_what_is_found_ends_them() -> None:
    steps = asked(Rest(LONGEST_REST), 200, frozenset({100}))
    first = next(step for step in steps if step >= 100)
    assert steps[steps.index(first) :] == list(range(first, 200))


def test_what_is_found_seldom_enough_does_not() -> None:
    """A hit in a hundred looks is worth half of what they take."""
    rest, num_asked = Rest(LONGEST_REST), 0
    for step in range(20_000):
        if not rest.is_on():
            num_asked += 1
            rest.saw(1.0 if step % 100 == 0 else 0.0, 2 * PRICE)
    assert num_asked < 8_000


def test_a_fixed_length_never_rests() -> None:
    assert asked(Rest(0), 30) == list(range(30))
