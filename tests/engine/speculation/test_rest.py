"""Nobody is asked where nothing was found, for longer and longer; once something is, at every step."""

from __future__ import annotations

from itertools import pairwise

from engine.speculation.speculator import LONGEST_REST, PATIENCE, Rest


def asked(rest: Rest, num_steps: int, found: frozenset[int] = frozenset()) -> list[int]:
    """Steps at which somebody was asked; in those of `found` something was worth it."""
    steps = []
    for step in range(num_steps):
        if not rest.is_on():
            steps.append(step)
            rest.saw(step in found)
    return steps


def test_rests_grow_to_the_longest() -> None:
    steps = asked(Rest(LONGEST_REST), 60)
    gaps = [after - before - 1 for before, after in pairwise(steps)]
    assert gaps[:PATIENCE] == [0] * PATIENCE
    assert gaps[PATIENCE : PATIENCE + 5] == [1, 2, 4, 8, 8]


def test_what_is_found_ends_them() -> None:
    first = asked(Rest(LONGEST_REST), 60)[PATIENCE + 2]
    steps = asked(Rest(LONGEST_REST), 60, frozenset({first}))
    assert steps[PATIENCE + 3 : PATIENCE + 3 + PATIENCE] == [first + 1 + i for i in range(PATIENCE)]


def test_a_fixed_length_never_rests() -> None:
    assert asked(Rest(0), 30) == list(range(30))
