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


def pool_of(*chains: tuple[bytes, ...], num_used: int = 0) -> BlockPool:
    """A pool that is full of cached blocks, all free, the first chain's the oldest, behind `num_used` blocks in use."""
    pool = BlockPool(num_used + sum(map(len, chains)))
    pool.allocate(num_used)
    for chain in chains:
        block_ids = pool.allocate(len(chain)) or []
        for block_id, block_hash in zip(block_ids, chain, strict=True):
            pool.publish(block_id, block_hash)
        pool.release(block_ids)
    return pool


def test_claimed_blocks_go_after_all_others_and_are_as_free() -> None:
    pool = pool_of((A, B), (C, D), num_used=4)
    pool.claim("r", [A, B])
    assert pool.num_free == 4
    held = pool.allocate(2)
    assert pool.find([A, B]) == [4, 5] and not pool.find([C])
    pool.check(dict.fromkeys((0, 1, 2, 3, 6, 7), 1))
    assert pool.allocate(1) == [5], "nothing else is free: the claim is given up"
    assert "r" not in pool.claims and pool.find([A, B]) == [4]
    assert held == [7, 6]


def test_the_oldest_claim_is_given_up_first_and_as_a_whole() -> None:
    pool = pool_of((A, B), (C, D), num_used=16)
    pool.claim("first", [C, D])
    pool.claim("second", [A, B])
    pool.claim("none of it is here", [b"e"])
    assert pool.allocate(1) == [19]
    assert ("first" in pool.claims, "second" in pool.claims) == (False, True)
    pool.check({**dict.fromkeys(range(16), 1), 19: 1})
    assert pool.allocate(1) == [18]
    assert "second" in pool.claims


def test_a_claim_holds_for_what_comes_later_and_ends() -> None:
    pool = BlockPool(3)
    pool.claim("r", [A])
    pool.claim("r", [A])
    pool.claim("other", [A])
    for block_id, block_hash in enumerate((A, B, C)):
        pool.allocate(1)
        pool.publish(block_id, block_hash)
        pool.release([block_id])
    assert pool.allocate(1) == [1]
    pool.acquire(pool.find([A]))  # as an admission does
    pool.unclaim("r")
    pool.unclaim("r")
    pool.release([0])
    pool.check({1: 1})
    assert pool.allocate(1) == [2], "the other request still claims it"
    pool.unclaim("other")
    pool.check({1: 1, 2: 1})
    assert pool.allocate(1) == [0] and not pool.claims.hashes


def test_claims_together_have_no_more_hashes_than_a_quarter_of_the_pool() -> None:
    """They rank above what other tenants retain."""
    pool = BlockPool(11)
    pool.claim("long", [A, B, C, D])
    assert set(pool.claims.hashes) == {A, B}
    pool.claim("next", [C])
    assert set(pool.claims.hashes) == {C} and "long" not in pool.claims
    pool.check({})


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
