"""Which sequences of a step are split: what would leave half of the chip idle, and no more than memory is kept for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.config import MAX_DRAFT_TOKENS
from pdmesh.engine.kernels.triton.split_kv import SplitBounds


def test_every_draft_is_split_and_chunks_up_to_half_a_chip() -> None:
    """Walking has a program for 128 rows."""
    assert [SplitBounds.of(heads).max_queries for heads in (8, 32, 64, 128, 256)] == [1024, 256, 128, 65, 65]
    assert SplitBounds.of(32).longest([17]) == 17
    assert SplitBounds.of(128).longest([1 + MAX_DRAFT_TOKENS]) == 1 + MAX_DRAFT_TOKENS
    assert [SplitBounds.of(32).longest([n]) for n in (256, 257)] == [256, 0]


def test_the_shortest_are_split_first_and_those_as_long_as_one_another_together() -> None:
    assert SplitBounds(100, 100).longest([100, 1, 1]) == 1
    assert SplitBounds(100, 100).longest([40, 1, 40, 19, 0]) == 40
    assert SplitBounds(100, 100).longest([40, 1, 40, 20, 500]) == 20
    assert SplitBounds.of(32).longest([17] * 16) == 0
    assert SplitBounds.of(32, num_rows=300).longest([17] * 16) == 17
    assert SplitBounds.of(32).longest([]) == SplitBounds.of(32).longest([0]) == 0


@given(st.lists(st.integers(0, 40)), st.integers(1, 40), st.integers(0, 300))
def test_as_many_as_fit(lengths: list[int], max_queries: int, num_tokens: int) -> None:
    longest = SplitBounds(max_queries, num_tokens).longest(lengths)
    assert sum(length for length in lengths if length <= longest) <= num_tokens
    longer = sorted({length for length in lengths if longest < length <= max_queries})
    if longer:
        assert sum(length for length in lengths if length <= longer[0]) > num_tokens
