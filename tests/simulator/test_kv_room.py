"""Blocks of a modelled worker: whole at all times, prefixes found until their place is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.simulator.workers.kv_room import CacheChanges, KvRoom, Sequence


class Nobody:
    """Wants to hear of no token."""

    def on_prompt(self, sequence: Sequence, at_s: float) -> None:
        """Nothing."""

    def on_end(self, sequence: Sequence, at_s: float) -> None:
        """Nothing."""


def prompt(num_tokens: int, *hashes: int) -> Sequence:
    return Sequence(Nobody(), None, num_tokens, 1, hashes=hashes)


def test_a_prefix_is_found_again() -> None:
    room = KvRoom(100, 16, 64)
    first = prompt(140, 1, 2)
    assert room.admit(first, 0)
    assert (first.num_cached, room.num_used) == (0, 9)
    room.publish(first)
    second = prompt(200, 1, 2, 3)
    assert room.admit(second, 0)
    assert (second.num_cached, room.num_used) == (128, 9 + 13 - 8)
    room.release(first)
    assert room.num_used == 13
    room.release(second)
    assert (room.num_used, room.num_hit_tokens) == (0, 128)
    assert room.take_changes() == CacheChanges([1, 2], [], [], [])


def test_never_all_of_a_prompt() -> None:
    room = KvRoom(100, 16, 64)
    first, second = prompt(128, 1, 2), prompt(128, 1, 2)
    room.admit(first, 0)
    room.publish(first)
    room.admit(second, 0)
    assert second.num_cached == 64


def test_what_was_used_longest_ago_makes_place() -> None:
    room = KvRoom(12, 16, 64)
    for name in (1, 2, 3):
        one = prompt(65, name)
        assert room.admit(one, 0)
        room.publish(one)
        room.release(one)
    assert room.take_changes() == CacheChanges([2, 3], [1], [], [])
    again = prompt(65, 2)
    assert room.admit(again, 0)
    assert again.num_cached == 64
    room.release(again)
    room.admit(prompt(65, 4), 0)
    assert room.take_changes() == CacheChanges([], [3], [], [])


def test_blocks_are_left_free() -> None:
    room = KvRoom(10, 16)
    assert not room.admit(prompt(160), 1)
    assert room.admit(prompt(144), 1)
    assert not room.admit(prompt(1), 1)


@given(st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(0, 6), unique=True, max_size=4), st.booleans()), max_size=40))
def test_blocks_are_whole(steps: list[tuple[int, list[int], bool]]) -> None:
    room, live = KvRoom(40, 16, 64), list[Sequence]()
    for num_tokens, hashes, publishes in steps:
        one = prompt(num_tokens, *hashes[: num_tokens // 64])
        if room.admit(one, 0):
            live.append(one)
            if publishes:
                room.publish(one)
        elif live:
            room.release(live.pop(0))
        room.check(live)
    for one in live:
        room.release(one)
    room.check(())
    assert room.num_used == 0


def test_a_wrong_count_is_noticed() -> None:
    room = KvRoom(40, 16)
    room.admit(prompt(20), 0)
    with pytest.raises(AssertionError, match="0 blocks are held, 2 are counted"):
        room.check(())
