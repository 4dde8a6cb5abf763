"""What was sent where: bounded in time and number, and the lazy answer against the dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.kv_index import index
from router.kv_index.block_map import BlockMap
from router.kv_index.index import CachedTokens, Part, PrefixMemory, together
from router.routing.worker_snapshot import WorkerKey

A, B = ("a:1", 1), ("b:1", 2)


def matched(memory: PrefixMemory, names: list[int], now: float) -> dict[WorkerKey, int]:
    return dict(together([Part(blocks, levels, 1) for blocks in memory.maps(now) if (levels := blocks.levels(names))]))


def test_leading_blocks_count() -> None:
    memory = PrefixMemory(100, 10.0)
    memory.record(A, [1, 2, 3], 0.0, keep=True)
    memory.record(B, [1, 9], 0.0, keep=False)
    assert matched(memory, [1, 2, 3, 4], 0.0) == {A: 3, B: 1}
    assert matched(memory, [2], 0.0) == {A: 1}
    assert matched(memory, [8, 1], 0.0) == {}


@pytest.mark.parametrize(
    ("now", "is_known"), [(9.9, True), (10.0, True), (15.0, True), (19.9, True), (20.0, False), (90.0, False)]
)
def test_what_is_not_kept_lapses(now: float, is_known: bool) -> None:
    memory = PrefixMemory(100, 10.0)
    memory.record(A, [1], 0.0, keep=False)
    memory.record(B, [1], 0.0, keep=True)
    assert matched(memory, [1], now) == ({A: 1, B: 1} if is_known else {B: 1})


def test_it_counts_for_the_whole_time_wherever_a_generation_ends() -> None:
    memory = PrefixMemory(100, 10.0)
    memory.record(A, [1], 0.0, keep=False)
    memory.record(B, [1], 9.9, keep=False)
    assert matched(memory, [1], 10.0) == {A: 1, B: 1}
    assert matched(memory, [1], 19.8) == {A: 1, B: 1}
    assert matched(memory, [1], 20.0) == {}


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.lists(st.integers(0, 30), max_size=12, unique=True), st.floats(0, 9))),
    st.integers(1, 8),
)
def test_is_bounded_and_never_invents(sent: list[tuple[WorkerKey, list[int], float]], max_blocks: int) -> None:
    memory, now, known = PrefixMemory(max_blocks, 10.0), 0.0, {A: set[int](), B: set[int]()}
    for worker, names, passes in sent:
        now += passes
        memory.record(worker, names, now, keep=worker == A)
        known[worker].update(names)
        assert all(len(blocks) <= max_blocks for blocks in memory.maps(now))
        assert all(set(names[:count]) <= known[each] for each, count in matched(memory, names, now).items())
    memory.forget(A)
    assert all(not blocks.blocks_of(A) for blocks in memory.maps(now))


def test_heads_of_prompts_outlive_their_tails() -> None:
    memory = PrefixMemory(2, 10.0)
    memory.record(A, [1, 2, 3], 0.0, keep=True)
    assert matched(memory, [1, 2, 3], 0.0) == {A: 2}


WORKERS: list[WorkerKey] = [(f"w{number}:1", number) for number in range(9)]
HELD = st.dictionaries(st.sampled_from(WORKERS), st.integers(1, 6), min_size=1)


@given(st.lists(HELD, min_size=1, max_size=3))
def test_the_lazy_answer_says_what_a_dictionary_says(held: list[dict[WorkerKey, int]]) -> None:
    names, parts = list(range(6)), list[Part]()
    for each in held:
        blocks = BlockMap(1000)
        for worker, count in each.items():
            blocks.add(worker, names[:count])
        parts.append(Part(blocks, blocks.levels(names), 16))
    plain, lazy = together(parts), CachedTokens(parts)
    assert isinstance(plain, dict)
    assert dict(lazy) == plain
    assert len(lazy) == len(plain)
    assert all(lazy.get(worker, -1) == plain.get(worker, -1) for worker in WORKERS)
    assert all((worker in lazy) == (worker in plain) for worker in WORKERS)


def test_many_holders_are_not_listed() -> None:
    blocks = BlockMap(1000)
    for number in range(index.LISTED + 1):
        blocks.add(("w:1", number), [1, 2])
    blocks.remove(("w:1", 7), [2])
    cached = together([Part(blocks, blocks.levels([1, 2, 3]), 16)])
    assert isinstance(cached, CachedTokens)
    assert (len(cached), cached[("w:1", 7)], cached[("w:1", 8)]) == (index.LISTED + 1, 16, 32)
    with pytest.raises(KeyError):
        cached[("w:1", 1000)]
