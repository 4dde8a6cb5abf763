"""The map of blocks against sets that say the same, and its bound."""

from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from router.kv_index.block_map import BlockMap, WorkerSlots
from router.routing.worker_snapshot import WorkerKey

A, B, C = ("a:1", 1), ("b:1", 2), ("c:1", 3)
NAMES = st.lists(st.integers(0, 12).map(lambda number: number << 60), max_size=10, unique=True)
CALLS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove", "forget", "touch"]), st.sampled_from([A, B, C]), NAMES),
    max_size=40,
)


def naive_match(truth: dict[WorkerKey, set[int]], names: list[int]) -> dict[WorkerKey, int]:
    counts = {worker: next((n for n, name in enumerate(names) if name not in held), len(names)) for worker, held in truth.items()}
    return {worker: count for worker, count in counts.items() if count}


def call(blocks: BlockMap, truth: dict[WorkerKey, set[int]], name: str, worker: WorkerKey, names: list[int]) -> None:
    if name == "forget":
        blocks.forget(worker)
        truth.pop(worker, None)
        return
    getattr(blocks, name)(worker, names)
    held = truth.setdefault(worker, set())
    if name == "add":
        held.update(names)
    elif name == "remove":
        held.difference_update(names)


@settings(max_examples=80, deadline=None)
@given(CALLS, NAMES)
def test_says_what_sets_say(calls: list[tuple[str, WorkerKey, list[int]]], names: list[int]) -> None:
    blocks, truth = BlockMap(1000), dict[WorkerKey, set[int]]()
    for name, worker, argument in calls:
        call(blocks, truth, name, worker, argument)
        assert blocks.match(names) == naive_match(truth, names)
        assert len(blocks) == sum(map(len, truth.values()))
        assert all(set(blocks.blocks_of(key)) == held for key, held in truth.items())


@settings(max_examples=80, deadline=None)
@given(CALLS, NAMES, st.integers(1, 15))
def test_is_bounded_and_never_says_more_than_it_was_told(
    calls: list[tuple[str, WorkerKey, list[int]]], names: list[int], max_entries: int
) -> None:
    blocks, truth = BlockMap(max_entries), dict[WorkerKey, set[int]]()
    for name, worker, argument in calls:
        call(blocks, truth, name, worker, argument)
        held = {key: set(blocks.blocks_of(key)) for key in truth}
        assert len(blocks) == sum(map(len, held.values())) <= max_entries
        assert all(held[key] <= told for key, told in truth.items())
        assert blocks.match(names) == naive_match(held, names)


def test_when_full_who_holds_most_gives_way() -> None:
    blocks = BlockMap(100)
    blocks.add(A, list(range(20)))
    blocks.add(B, list(range(1000, 1500)))
    assert len(blocks.blocks_of(A)) == 20
    assert 70 <= len(blocks.blocks_of(B)) <= 80


def test_beginnings_outlive_ends_and_what_is_used_stays() -> None:
    blocks = BlockMap(4)
    blocks.add(A, [1, 2, 3, 4])
    blocks.touch(A, [1, 2])
    blocks.add(A, [5])
    assert blocks.match([1, 2, 3, 4]) == {A: 3}
    blocks.add(A, [6])
    assert blocks.match([1, 2]) == {A: 2}


def test_a_slot_is_used_again_and_nothing_of_its_owner_before_is_left() -> None:
    blocks = BlockMap(100)
    for number in range(50):
        worker = ("w:1", number)
        blocks.add(worker, [number, 7])
        assert blocks.match([7]) == {worker: 1}
        blocks.forget(worker)
    assert len(blocks) == 0
    assert blocks.match([7]) == {}


def test_equal_masks_are_one_object() -> None:
    """With thousands of workers a mask has hundreds of bytes."""
    blocks = BlockMap(10_000)
    for number in range(600):
        blocks.add(("w:1", number), [1])
    blocks.add(("w:1", 599), list(range(1000)))
    masks = {id(mask): sys.getsizeof(mask) for mask in blocks._masks.values()}
    assert len(masks) == 2


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), CALLS.map(lambda calls: calls[:4])), max_size=8), NAMES)
def test_two_maps_are_looked_up_as_if_they_were_one(
    told: list[tuple[bool, list[tuple[str, WorkerKey, list[int]]]]], names: list[int]
) -> None:
    slots = WorkerSlots()
    pool, tiers = BlockMap(1000, slots), BlockMap(1000, slots)
    pool_truth, tier_truth = dict[WorkerKey, set[int]](), dict[WorkerKey, set[int]]()
    for is_pool, calls in told:
        for name, worker, argument in calls:
            call(*((pool, pool_truth) if is_pool else (tiers, tier_truth)), name, worker, argument)
    either = {key: pool_truth.get(key, set()) | tier_truth.get(key, set()) for key in (A, B, C)}
    assert pool.workers_of(pool.levels_of_either(tiers, names)) == naive_match(either, names)
    assert (pool.match(names), tiers.match(names)) == (naive_match(pool_truth, names), naive_match(tier_truth, names))


def test_a_shared_slot_is_free_once_both_maps_have_forgotten_its_worker() -> None:
    slots = WorkerSlots()
    pool, tiers = BlockMap(100, slots), BlockMap(100, slots)
    pool.add(A, [1])
    tiers.add(A, [2])
    pool.forget(A)
    pool.add(B, [1])
    assert pool.workers_of(pool.levels_of_either(tiers, [2])) == {A: 1}
    assert tiers.match([2]) == {A: 1} and pool.match([1]) == {B: 1}
    tiers.forget(A)
    tiers.add(C, [3])
    assert len(slots.workers) == 2 and tiers.match([3]) == {C: 1}
