"""The blocks of all workers as one prefix cache."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.third_party.vllm import smg_common_pb2 as common_pb
from pdmesh.v1 import worker_pb2
from router.api.vllm import kv_events
from router.kv_events.follower import InvalidEvents, MeshUpdate, blocks_of
from router.kv_events.mesh_blocks import MeshBlock, MeshBlocks, MeshChanges

ROOT = bytes(16)


def block(name: int, parent: int | None = None) -> MeshBlock:
    return MeshBlock(name, parent, array("I", [name % 1000, 1]), ROOT, "")


NAMES = st.sets(st.integers(0, 7))
CALLS = st.lists(st.tuples(st.sampled_from(["change", "replace", "forget"]), st.integers(0, 2), NAMES, NAMES), max_size=30)


@given(CALLS)
def test_a_subscriber_knows_what_at_least_one_worker_holds(calls: list[tuple[str, int, set[int], set[int]]]) -> None:
    mesh, told = MeshBlocks(), set[int]()
    held: dict[int, set[int]] = {number: set() for number in range(3)}
    for call, worker, some, others in calls:
        key = (f"w{worker}", worker)
        if call == "change":
            changes = mesh.change(key, some, map(block, others))
            held[worker] = held[worker] - some | others
        elif call == "replace":
            changes = mesh.replace(key, map(block, some))
            held[worker] = set(some)
        else:
            changes = mesh.forget(key)
            held[worker] = set()
        stored = {each.name for each in changes.stored}
        assert set(changes.removed) <= told
        assert not stored & (told - set(changes.removed))
        told = told - set(changes.removed) | stored
        assert told == set().union(*held.values()) == {each.name for each in mesh.all()}
        assert mesh.num_pairs == sum(map(len, held.values()))


def test_a_snapshot_is_cut_into_parts_with_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "PART_BLOCKS", 2)
    names = [1, 2, 3, 4, (1 << 64) - 1]
    blocks = tuple(block(name, names[index - 1] if index else None) for index, name in enumerate(names))
    stream = kv_events.EventStream(lambda root: False)
    batches = list(stream.batches(MeshUpdate(True, MeshChanges((), blocks[::-1])), 5.0))
    assert [(each.sequence_number, each.snapshot.index, each.snapshot.count, each.snapshot.blocks) for each in batches] == [
        (1, 0, 3, 5),
        (2, 1, 3, 5),
        (3, 2, 3, 5),
    ]
    assert [event.WhichOneof("data") for each in batches for event in each.events] == ["cleared", "stored", "stored", "stored"]
    stored = [event.stored for each in batches for event in each.events if event.HasField("stored")]
    assert [each.block_hash for chain in stored for each in chain.blocks] == [1, 2, 3, 4, -1]
    assert [chain.parent_block_hash for chain in stored] == [0, 2, 4]
    assert [chain.HasField("parent_block_hash") for chain in stored] == [False, True, True]
    assert {chain.cache_salt for chain in stored} == {ROOT.hex()}
    [empty] = stream.batches(MeshUpdate(True, MeshChanges()), 6.0)  # of a subscriber that fell behind
    assert (empty.sequence_number, empty.snapshot.count, empty.events[0].event_id) == (4, 1, 0)


def test_changes_are_removed_first_and_events_counted() -> None:
    stream = kv_events.EventStream(lambda root: True)
    gone, came = stream.batches(MeshUpdate(False, MeshChanges((9,), (block(1), block(5)))), 5.0)
    assert list(gone.events[0].removed.block_hashes) == [9]
    assert [event.event_id for batch in (gone, came) for event in batch.events] == [1, 2, 3]
    stored = came.events[0].stored
    assert not stored.HasField("cache_salt")
    assert (stored.tier, stored.medium, list(stored.blocks[0].token_ids)) == (common_pb.KV_CACHE_TIER_DEVICE, "GPU", [1, 1])
    assert not came.HasField("snapshot")


@pytest.mark.parametrize(
    ("stored", "field"),
    [
        (worker_pb2.StoredBlocks(token_ids=[1, 2]), "token_ids"),
        (worker_pb2.StoredBlocks(blocks=[1], token_ids=[1]), "token_ids"),
        (worker_pb2.StoredBlocks(blocks=[1], token_ids=[1, 2], cache_root=b"short"), "cache_root"),
        (worker_pb2.StoredBlocks(blocks=[1], token_ids=[1, 2], cache_root=ROOT, adapter="a" * 200), "adapter"),
    ],
)
def test_what_a_worker_sends_is_checked(stored: worker_pb2.StoredBlocks, field: str) -> None:
    with pytest.raises(InvalidEvents, match=rf"stored\[0\]\.{field}"):
        list(blocks_of(worker_pb2.BlockEvents(stored=[stored]), 2))
