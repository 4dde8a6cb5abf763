"""Trees of tokens, and what of them was right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.speculation.draft import NOTHING, ROOT, Draft, Verified

#  root ── 7 ── 8 ── 9
#     └─── 5 ── 6
TREE = Draft((7, 8, 9, 5, 6), (-1, 0, 1, -1, 3), (0.5, 0.8, 0.5, 0.4, 0.5), "test")


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Depth first, no two children alike."""
    parents: list[int] = []
    path = [ROOT]
    for index in range(draw(st.integers(0, 10))):
        del path[draw(st.integers(1, len(path))) :]
        parents.append(path[-1])
        path.append(index)
    token_ids = [4 * index + draw(st.integers(0, 3)) for index in range(len(parents))]
    return Draft(tuple(token_ids), tuple(parents), (0.5,) * len(parents), "test")


def test_places() -> None:
    assert TREE.depths == (1, 2, 3, 1, 2)
    assert TREE.branches == (range(3), range(3, 5))
    assert TREE.branch(4) == (3, 4)
    assert TREE.cumulative == pytest.approx((0.5, 0.4, 0.2, 0.4, 0.2))
    assert not TREE.is_chain and TREE.first(3).is_chain and NOTHING.is_chain


def test_cutting() -> None:
    assert TREE.keep([True, False, True, True, True]).token_ids == (7, 5, 6)
    assert TREE.keep([True, False, True, True, True]).parents == (-1, -1, 1)
    assert TREE.first(9) is TREE
    with pytest.raises(ValueError, match="chances: 1 for 2 tokens"):
        Draft.chain((1, 2), (0.5,), "test")


@pytest.mark.parametrize(
    ("draws", "new_tokens"),
    [
        ((1, 0, 0, 0, 0, 0), (1,)),
        ((7, 1, 0, 0, 0, 0), (7, 1)),
        ((7, 8, 9, 4, 0, 0), (7, 8, 9, 4)),
        ((5, 8, 9, 4, 6, 3), (5, 6, 3)),
        ((5, 8, 9, 4, 2, 6), (5, 2)),
    ],
)
def test_what_was_drawn(draws: tuple[int, ...], new_tokens: tuple[int, ...]) -> None:
    assert Verified(TREE, draws).new_tokens == new_tokens


@given(trees(), st.data())
def test_kept_tokens_are_a_branch_of_what_was_drawn(draft: Draft, data: st.DataObject) -> None:
    draws = tuple(data.draw(st.sampled_from([*draft.token_ids, 99])) for _ in range(1 + len(draft)))
    verified = Verified(draft, draws)
    assert not verified.kept or verified.kept == draft.branch(verified.kept[-1])
    assert [draft.token_ids[node] for node in verified.kept] == list(verified.new_tokens[:-1])
    last = verified.kept[-1] if verified.kept else ROOT
    follows = {draft.token_ids[i] for i, parent in enumerate(draft.parents) if parent == last}
    assert verified.new_tokens[-1] not in follows


@given(trees(), st.data())
def test_what_is_left_of_a_tree_hangs_together(draft: Draft, data: st.DataObject) -> None:
    wanted = [data.draw(st.booleans()) for _ in draft.token_ids]
    left = draft.keep(wanted)
    assert all(parent < index for index, parent in enumerate(left.parents))
    paths = {tuple(draft.token_ids[i] for i in draft.branch(index)) for index in range(len(draft))}
    assert {tuple(left.token_ids[i] for i in left.branch(index)) for index in range(len(left))} <= paths
    assert [len(b) for b in left.branches] == [] or sum(len(b) for b in left.branches) == len(left)
