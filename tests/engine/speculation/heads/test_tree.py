"""The best tree is the best of all trees."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.speculation.draft_heads.proposer import best_tree

Guesses = list[list[tuple[int, float]]]
_CHANCES = st.lists(st.sampled_from([0.5, 0.4, 0.3, 0.25, 0.1, 0.05, 0.0]), min_size=1, max_size=3, unique=True)


@st.composite
def guesses(draw: st.DrawFn) -> Guesses:
    places = draw(st.lists(_CHANCES, min_size=1, max_size=3))
    return [
        [(10 * depth + rank, chance) for rank, chance in enumerate(sorted(place, reverse=True))]
        for depth, place in enumerate(places)
    ]


def all_nodes(guesses: Guesses) -> dict[tuple[int, ...], float]:
    """Every branch of the whole tree, and how likely it is kept."""
    nodes = {}
    for depth in range(1, len(guesses) + 1):
        for path in itertools.product(*guesses[:depth]):
            kept = 1.0
            for _, chance in path:
                kept *= chance
            nodes[tuple(token for token, _ in path)] = kept
    return nodes


@given(guesses(), st.integers(1, 12), st.sampled_from([0.0, 0.04, 0.2]))
def test_no_other_tree_is_likelier(guesses: Guesses, max_tokens: int, least: float) -> None:
    draft = best_tree(guesses, max_tokens, least, "heads")
    nodes = all_nodes(guesses)
    paths = [tuple(draft.token_ids[at] for at in draft.branch(index)) for index in range(len(draft))]
    assert len(set(paths)) == len(paths) <= max_tokens
    assert all(index == 0 or draft.parents[index] < index for index in range(len(draft)))
    assert draft.cumulative == pytest.approx([nodes[path] for path in paths])
    allowed = sorted((kept for kept in nodes.values() if kept >= least * (1 + 1e-9)), reverse=True)[:max_tokens]
    assert sum(draft.cumulative) >= sum(allowed) - 1e-9
    assert all(kept >= least * (1 - 1e-9) for kept in draft.cumulative)


def test_depth_first() -> None:
    draft = best_tree([[(1, 0.6), (2, 0.3)], [(3, 0.9)]], 4, 0.0, "heads")
    assert (draft.token_ids, draft.parents) == ((1, 3, 2, 3), (-1, 0, -1, 2))
    assert draft.chances == (0.6, 0.9, 0.3, 0.9)
