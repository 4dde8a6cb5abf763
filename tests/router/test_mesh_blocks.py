"""The blocks of all workers as one prefix cache."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.rpc.interceptor import Context
from pdmesh.text.block_hash import in_chains
from pdmesh.third_party.vllm import smg_common_pb2 as common_pb
from pdmesh.v1 import worker_pb2
from router.api.vllm import kv_events
from router.fleet.following import InvalidMessage
from router.kv_events import follower
from router.kv_events.follower import MeshUpdate, blocks_of
from router.kv_events.mesh_blocks import MeshBlock, MeshBlocks, MeshChanges
from tests.router.stub_workers import DECODE, StubWorker
from tests.router.test_fleet import running_fleet
from tests.support.waiting import eventually

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


async def test_a_snapshot_is_cut_into_parts_with_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "PART_BLOCKS", 2)
    names = [1, 2, 3, 4, (1 << 64) - 1]
    blocks = tuple(block(name, names[index - 1] if index else None) for index, name in enumerate(names))
    stream = kv_events.EventStream(lambda root: False)
    whole = MeshUpdate(True, MeshChanges((), blocks[::-1]))
    batches = list(stream.batches(whole, await kv_events.parts_of(whole), 5.0))
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
    [empty] = stream.batches(MeshUpdate(True, MeshChanges()), [], 6.0)  # of a subscriber that fell behind
    assert (empty.sequence_number, empty.snapshot.count, empty.events[0].event_id) == (4, 1, 0)


@pytest.mark.parametrize(("num_blocks", "is_in_thread"), [(3, True), (2, False)])
async def test_a_large_update_is_ordered_beside_the_loop(
    num_blocks: int, is_in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, really = set[int](), in_chains

    def noted(*arguments: Any) -> Iterator[Any]:
        threads.add(threading.get_ident())
        yield from really(*arguments)

    monkeypatch.setattr(kv_events, "PART_BLOCKS", 2)
    monkeypatch.setattr(kv_events, "in_chains", noted)
    await kv_events.parts_of(MeshUpdate(True, MeshChanges((), tuple(map(block, range(num_blocks))))))
    assert len(threads) == 1 and (threading.get_ident() not in threads) == is_in_thread


async def test_changes_are_removed_first_and_events_counted() -> None:
    stream = kv_events.EventStream(lambda root: True)
    changes = MeshUpdate(False, MeshChanges((9,), (block(1), block(5))))
    gone, came = stream.batches(changes, await kv_events.parts_of(changes), 5.0)
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
    with pytest.raises(InvalidMessage, match=rf"stored\[0\]\.{field}"):
        list(blocks_of(worker_pb2.BlockEvents(stored=[stored]), 2))


class BreakingWorker(StubWorker):
    """A stub whose streams of KV events break at once, but for the fifth, which lists its blocks, and the seventh."""

    num_streams = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ends = asyncio.Event()

    async def WatchBlocks(  # type: ignore[override]  # the stub has none
        self, request: worker_pb2.WatchBlocksRequest, context: Context
    ) -> AsyncIterator[worker_pb2.BlockEvents]:
        self.num_streams += 1
        if self.num_streams == 5:
            yield worker_pb2.BlockEvents(epoch=self.epoch, is_list=True, is_last=True)
            await self.resume.wait()
        if self.num_streams == 7:
            await self.ends.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")


async def test_a_stream_that_has_listed_its_blocks_is_asked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gaps between tries double only while nothing comes."""
    monkeypatch.setattr(follower, "FIRST_GAP_S", 0.001)
    worker = BreakingWorker("d0", (DECODE,))
    await worker.start()
    async with running_fleet(worker.address) as fleet:
        await eventually(lambda: fleet.views())
        blocks = follower.BlockFollower(fleet, worker.info().identity.model, 100)
        async with aclosing(blocks.read()) as updates:
            assert await anext(updates) == MeshUpdate(True, MeshChanges())
            (followed,) = blocks._followed.values()
            assert (worker.num_streams, followed.gap.seconds) == (5, 0.001)
            worker.resume.set()
            await eventually(lambda: worker.num_streams == 7)
            assert followed.gap.seconds == 0.004  # without the reset, the fifth break alone would have led to 0.016
            worker.ends.set()
    await worker.kill()
