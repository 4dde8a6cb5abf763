"""Pools whose keys and values of a block lie together, in an order of another engine's: they move as they are, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from kvtransfer.errors import PushFailed
from kvtransfer.layout import Layout
from kvtransfer.manifest import check_memory
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from kvtransfer.staging import StagedMemory
from pdmesh.engine.kv_cache.staging import StagingSizes
from pdmesh.engine.kv_cache.streams import Streams
from pdmesh.v1 import common_pb2
from pdmesh_vllm.staging import raw_blocks, stage, zero
from tests.kvtransfer.endpoints import World, running
from tests.kvtransfer.staged_world import at_work
from tests.support.kv_memory import FakeKVMemory, make_layout
from tests.support.reordering import ReorderingStreams

JOINED = make_layout(arrangement="joined-other-engine")


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc", "tcp+tls"])
async def test_blocks_arrive_whole(transport: str) -> None:
    world = World(transport, layout=JOINED)
    async with running(world):
        jobs = [world.job(f"r{i}", num_blocks=12, first_block=i, start=12 * i, spread=True) for i in range(2)]
        await asyncio.gather(*(world.sender.push(job, timeout_s=10) for job in jobs))
        for job in jobs:
            held = world.delegate.held[job.reservation.reservation_id]
            for source_id, target_id in list(zip(job.source_block_ids, held.block_ids, strict=True))[held.first_block :]:
                assert world.source.block_bytes(source_id) == world.target.block_bytes(target_id)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("arrangement", make_layout()),
        ("arrangement", make_layout(arrangement="joined-other-instructions")),
        ("block_size", make_layout(32, arrangement=JOINED.arrangement)),
        ("kv_dtype", make_layout(kv_dtype="float32", arrangement=JOINED.arrangement)),
    ],
)
async def test_what_differs_is_named_and_nothing_is_written(field: str, other: common_pb2.KVLayout) -> None:
    assert Layout.of(JOINED).difference(Layout.of(other)) == field == Layout.of(other).difference(Layout.of(JOINED))
    world = World("tcp", layout=JOINED, source_layout=other)
    async with running(world):
        with pytest.raises(PushFailed, match=f"layout.{field}"):
            await world.sender.push(world.job(num_blocks=2), timeout_s=10)
        assert bytes(world.target.memory()) == world.before


def test_a_pool_of_the_other_kind_is_not_what_the_layout_promises() -> None:
    world = World("tcp", layout=JOINED)
    two = FakeKVMemory(world.target.num_layers, 4, world.target.bytes_per_layer_block)
    with pytest.raises(ValueError, match="planes"):
        check_memory(two, world.identity, JOINED)
    for memory in (two, world.source, world.target):
        memory.close()


class Layers:
    """A pool as vLLM keeps it on a device: a tensor for each layer, in another order than its shape says."""

    def __init__(self, shown: FakeKVMemory, streams: Streams) -> None:
        self._shown = shown
        heads, tokens = 2, 16
        stored = torch.frombuffer(bytearray(shown.memory()), dtype=torch.bfloat16).view(shown.num_layers, -1, tokens, heads, 16)
        self.caches = {f"layer {index}": stored[index].transpose(1, 2) for index in range(shown.num_layers)}
        self.blocks = raw_blocks(self.caches)
        sizes = StagingSizes(num_pieces=2, piece_bytes=6 * shown.bytes_per_layer_block)
        self.memory: StagedMemory = stage(self.blocks, streams, sizes, sizes)

    def show(self) -> None:
        """What the pool holds now is what checks look at."""
        self._shown.memory()[:] = b"".join(layer.numpy().tobytes() for layer in self.blocks)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_layers_on_a_device_go_through_pieces(transport: str) -> None:
    """More pushes than pieces, on a device that does things as late as it may."""
    world, streams = World(transport, layout=JOINED), ReorderingStreams()
    with at_work(streams):
        source, target = Layers(world.source, streams), Layers(world.target, streams)
        settings: dict[str, Any] = {"transports": (transport,)}
        world.sender = Sender(source.memory, world.identity, JOINED, 7)
        world.receiver = Receiver(target.memory, world.delegate, world.identity, JOINED, **settings)
        async with running(world):
            jobs = [world.job(f"r{i}", num_blocks=15, first_block=2, start=15 * i, spread=True) for i in range(3)]
            await asyncio.gather(*(world.sender.push(job, timeout_s=10) for job in jobs))
            for each in (source, target):
                each.show()
            for job in jobs:
                held = world.delegate.held[job.reservation.reservation_id]
                for source_id, target_id in list(zip(job.source_block_ids, held.block_ids, strict=True))[2:]:
                    assert world.source.block_bytes(source_id) == world.target.block_bytes(target_id)
        source.memory.close()
        target.memory.close()


def test_zeros_go_into_blocks_of_all_layers_and_no_others() -> None:
    caches = {name: torch.ones(5, 2, 16, 16).transpose(1, 2) for name in "ab"}
    zero(raw_blocks(caches), [3, 1])
    for cache in caches.values():
        assert cache[[0, 2, 4]].eq(1).all() and cache[[1, 3]].eq(0).all()


def test_layers_that_are_not_alike_are_refused_by_their_name() -> None:
    whole = torch.zeros(5, 2, 16, 16)
    with pytest.raises(ValueError, match="KV of b"):
        raw_blocks({"a": whole, "b": torch.zeros(5, 2, 16, 8)})
    with pytest.raises(ValueError, match="KV of a"):
        raw_blocks({"a": torch.zeros(5, 2, 16, 32)[..., :16]})
