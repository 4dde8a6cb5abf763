"""The block pool: exact ids, eviction order, ref counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.kv_cache.block_pool import BlockPool, num_blocks_for

A, B, C, D = b"a", b"b", b"c", b"d"


def test_allocates_in_order_and_says_none_when_short() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [3]


def test_uncached_blocks_are_reused_before_any_cached_one() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.publish(0, A)
    pool.publish(1, B)
    pool.release([0, 1, 2])
    assert pool.allocate(2) == [2, 3]
    assert pool.find([A, B]) == [0, 1]


def test_evicts_least_recently_used_first_and_ends_of_chains_before_beginnings() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    for block_id, block_hash in enumerate((A, B, C, D)):
        pool.publish(block_id, block_hash)
    pool.release([2, 3])  # the older chain: C, D
    pool.release([0, 1])  # the younger one: A, B
    assert [pool.allocate(1) for _ in range(4)] == [[3], [2], [1], [0]]
    assert pool.find([A]) == []
    assert pool.num_cached == 0


def test_a_hit_makes_a_block_recent() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.publish(0, A)
    pool.publish(1, B)
    pool.release([0])
    pool.release([1])
    pool.acquire(pool.find([A]))
    pool.release([0])
    assert pool.allocate(1) == [1]


def test_shared_blocks_are_free_only_after_the_last_release() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.acquire([0])
    assert pool.ref_count(0) == 2
    pool.release([0, 1])
    assert pool.num_free == 1
    pool.release([0])
    assert pool.num_free == 2


def test_find_stops_at_the_first_gap_of_the_chain() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.publish(0, A)
    pool.publish(2, C)
    assert pool.find([A, B, C]) == [0]
    assert pool.find([B, C]) == []


def test_equal_content_is_found_where_it_was_published_first() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.publish(0, A)
    pool.publish(1, A)
    assert pool.find([A]) == [0]
    pool.release([0, 1])
    assert pool.allocate(1) == [1], "the second copy was never cached, so it goes first"


def test_num_free_among_counts_what_acquiring_would_take() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.release([1, 2])
    assert pool.num_free_among([0, 1, 2]) == 2


def test_releasing_what_nobody_holds_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="block 0"):
        BlockPool(1).release([0])


def test_check_finds_a_reference_too_many() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.check({0: 1})
    with pytest.raises(IntegrityError):
        pool.check({})
    with pytest.raises(IntegrityError):
        pool.check({0: 2})


def test_num_blocks_for_rounds_up() -> None:
    assert [num_blocks_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "acquire", "release", "publish"]), st.integers(0, 7)), max_size=60))
def test_any_sequence_of_calls_keeps_the_pool_whole(calls: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    held: Counter[int] = Counter()
    for name, argument in calls:
        if name == "allocate":
            held.update(pool.allocate(argument % 4) or [])
        elif name == "acquire":
            found = pool.find([bytes([argument])])
            pool.acquire(found)
            held.update(found)
        elif held:
            block_id = sorted(held.elements())[argument % held.total()]
            if name == "publish":
                pool.publish(block_id, bytes([argument]))
            else:
                pool.release([block_id])
                held -= Counter([block_id])
        pool.check(held)
