"""Names of KV blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.text.block_hash import HASH_BYTES, cache_root, hash_block, hash_prompt, short_name, short_names

ROOT = cache_root("model", 3, salt="")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 16))
def test_a_prompt_is_a_chain_of_its_full_blocks(ids: list[int], block_size: int) -> None:
    hashes = hash_prompt(ROOT, ids, block_size)
    assert len(hashes) == len(ids) // block_size
    parent = ROOT
    for index, name in enumerate(hashes):
        parent = hash_block(parent, ids[index * block_size : (index + 1) * block_size])
        assert name == parent
        assert len(name) == HASH_BYTES


def test_every_input_counts() -> None:
    names = {
        hash_block(ROOT, [1, 2]),
        hash_block(ROOT, [2, 1]),
        hash_block(ROOT, [1, 2, 0]),
        hash_block(b"", [1, 2]),
        hash_block(hash_block(ROOT, [1]), [2]),
        hash_block(cache_root("model", 3, salt="tenant"), [1, 2]),
        hash_block(cache_root("model", "3", salt=""), [1, 2]),
        hash_block(cache_root("mode", "l3", salt=""), [1, 2]),
    }
    assert len(names) == 8


def test_the_hash_is_pinned() -> None:
    """Workers of two releases share prefixes by these bytes: a change needs a new protocol version."""
    assert hash_block(b"", [1, 2, 3]).hex() == "955a754a4b9bbac1cf4764d9a7e49856"


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_ids_beyond_32_bits_are_refused(bad: list[int]) -> None:
    with pytest.raises(OverflowError):
        hash_block(ROOT, bad)


@given(st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=5))
def test_short_names_are_those_of_each(hashes: list[bytes]) -> None:
    assert short_names(hashes) == [short_name(each) for each in hashes]
