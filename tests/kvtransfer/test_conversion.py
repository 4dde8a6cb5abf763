"""Pushes between pools of different layouts: other block sizes, element types and shares of the heads."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import numpy as np
import pytest

from kvtransfer.conversion import FP8, Numbers, kv_format
from kvtransfer.errors import PushFailed, TransferRefused
from kvtransfer.layout import Layout
from kvtransfer.manifest import Part, check_layout
from kvtransfer.sender.send_queue import FirstTokensDrawn, KVReadiness, Ready
from pdmesh.v1 import common_pb2, transfer_pb2
from tests.kvtransfer.conftest import CONVERTING
from tests.kvtransfer.endpoints import CHOICES, World, nothing_left, running, until
from tests.support.kv_memory import FakeKVMemory, make_identity, make_layout

IDENTITY = make_identity(num_layers=3, num_kv_heads=4, head_dim=16)
SCALES = ((0.5, 2.0), (0.03, 0.25), (1.0, 3.0))  # of fp8: a layer's keys, its values
PAIRS = {
    "larger blocks": (make_layout(16), make_layout(48)),
    "smaller blocks": (make_layout(48), make_layout(16)),
    "odd blocks": (make_layout(24), make_layout(10)),
    "bf16 to int8": (make_layout(16), make_layout(16, "int8")),
    "float32 to bf16": (make_layout(16, "float32"), make_layout(16)),
    "int8 to bf16, larger": (make_layout(16, "int8"), make_layout(32)),
    "panels": (make_layout(16, arrangement="panels"), make_layout(32, "int8", arrangement="panels")),
    "half of the heads": (make_layout(16), make_layout(32, size=2, rank=1)),
    "fp8, larger": (make_layout(16, FP8), make_layout(32, FP8)),
    "fp8 to bf16": (make_layout(16, FP8), make_layout(16)),
    "fp8 to float16": (make_layout(16, FP8), make_layout(16, "float16")),
    "float32 to fp8, smaller": (make_layout(32, "float32"), make_layout(16, FP8)),
}


def fill(memory: FakeKVMemory, layout: common_pb2.KVLayout) -> None:
    """Real numbers everywhere."""
    form, draw = kv_format(IDENTITY, Layout.of(layout)), np.random.default_rng(1)
    shape = (memory.num_blocks * form.block_size, form.num_heads, form.head_dim)
    for layer in range(memory.num_layers):
        for kv in (0, 1):
            numbers = Numbers("float32", draw.standard_normal(shape).astype(np.float32)).converted(form.dtype)
            blocks = form.pack(numbers, is_value=bool(kv))
            for block in range(memory.num_blocks):
                memory.block_view(layer, kv, block)[:] = blocks[block].tobytes()


def read(memory: FakeKVMemory, layout: common_pb2.KVLayout, block_ids: list[int], layer: int, kv: int) -> Numbers:
    raw = np.stack([np.frombuffer(bytes(memory.block_view(layer, kv, block)), np.uint8) for block in block_ids])
    return kv_format(IDENTITY, Layout.of(layout)).unpack(raw, is_value=bool(kv))


def make_world(transport: str, source: common_pb2.KVLayout, target: common_pb2.KVLayout) -> World:
    world = World(
        transport, identity=IDENTITY, layout=target, source_layout=source, num_blocks=24, part_bytes=9000, fp8_scales=SCALES
    )
    fill(world.source, source)
    fill(world.target, target)
    world.before = bytes(world.target.memory())
    return world


def check(world: World, name: str, source_ids: list[int], num_tokens: int, first_token: int) -> None:
    """Tokens from `first_token` on are the sender's; those before, and all other blocks, are as they were."""
    held = world.delegate.held[name]
    ids, ours = list(held.block_ids), Layout.of(world.layout).heads(IDENTITY.num_kv_heads)
    theirs = Layout.of(world.source_layout).heads(IDENTITY.num_kv_heads)
    original = FakeKVMemory(world.target.num_layers, world.target.num_blocks, world.target.bytes_per_layer_block)
    original.memory()[:] = world.before
    for layer in range(IDENTITY.num_layers):
        for kv in (0, 1):
            now = read(world.target, world.layout, ids, layer, kv)
            sent = read(world.source, world.source_layout, source_ids, layer, kv)
            theirs_of_ours = sent.heads(ours.start - theirs.start, ours.stop - theirs.start)
            wanted = theirs_of_ours.converted(world.layout.kv_dtype, SCALES[layer][kv])
            assert np.array_equal(now.values[first_token:num_tokens], wanted.values[first_token:num_tokens]), (layer, kv)
            if wanted.scales is not None:
                assert now.scales is not None
                assert np.array_equal(now.scales[first_token:num_tokens], wanted.scales[first_token:num_tokens])
            before = read(original, world.layout, ids, layer, kv)
            assert np.array_equal(now.values[:first_token], before.values[:first_token])
    original.close()
    world.check_untouched(set(range(world.target.num_blocks)) - set(ids))


@pytest.fixture(params=CONVERTING)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("first_block", [0, 1])
async def test_numbers_arrive_in_our_form(transport: str, name: str, first_block: int) -> None:
    source, target = PAIRS[name]
    with nothing_left():
        async with running(make_world(transport, source, target)) as world:
            job = world.job(num_blocks=5, first_block=first_block)
            result = await world.sender.push(job, timeout_s=10)
            assert result.committed
            check(world, "r1", list(job.source_block_ids), job.num_tokens, first_block * target.block_size)


async def test_shards_of_the_sender_fill_one_pool(transport: str) -> None:
    """Two ranks push their halves of the heads, as two processes of one tensor-parallel worker would; the first one commits."""
    whole, target = make_layout(16), make_layout(16, "int8")
    halves = [make_layout(16, size=2, rank=rank) for rank in (0, 1)]
    with nothing_left():
        async with running(make_world(transport, whole, target)) as world:
            job = world.job(num_blocks=4)
            part, ids = Part(0, 0, IDENTITY.num_layers, 0, 4), [0, 1, 2, 3]
            hello = world.hello("r1")
            async with AsyncExitStack() as stack:
                peers = []
                for rank, layout in enumerate(halves):
                    shard = stack.enter_context(shard_of(world, whole, layout))
                    greeting = transfer_pb2.TransferHello.FromString(hello.SerializeToString())
                    greeting.layout.CopyFrom(layout)
                    greeting.connection = rank
                    peers.append(await stack.enter_async_context(world.raw_peer(greeting, source=shard)))
                commit = transfer_pb2.TransferCommit(num_parts=2, num_tokens=job.num_tokens, choices=CHOICES)
                assert (await peers[0].send_part(part, ids)).part_reply.ok
                assert (await peers[1].send_part(part, ids)).part_reply.ok
                await peers[0].send(commit=commit)
                assert (await peers[0].stream.read_message()).commit_reply.code == 0
            await until(lambda: world.receiver.num_connections == 0, "both connections end")
            check(world, "r1", ids, job.num_tokens, 0)


async def test_half_of_the_shards_is_not_enough(transport: str) -> None:
    whole = make_layout(16)
    with nothing_left():
        async with running(make_world(transport, whole, make_layout(16, "int8"))) as world:
            job = world.job(num_blocks=4)
            hello = world.hello("r1")
            hello.layout.CopyFrom(make_layout(16, size=2, rank=0))
            with shard_of(world, whole, hello.layout) as shard:
                async with world.raw_peer(hello, source=shard) as peer:
                    assert (await peer.send_part(Part(0, 0, 3, 0, 4), [0, 1, 2, 3])).part_reply.ok
                    await peer.send(commit=transfer_pb2.TransferCommit(num_parts=1, num_tokens=job.num_tokens, choices=CHOICES))
                    code, message = await peer.verdict()
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "layer 0, block 0 was never sent" in message


class shard_of:
    """A pool with one rank's heads of the world's source."""

    def __init__(self, world: World, whole: common_pb2.KVLayout, layout: common_pb2.KVLayout) -> None:
        form, heads = kv_format(IDENTITY, Layout.of(layout)), Layout.of(layout).heads(IDENTITY.num_kv_heads)
        self.memory = FakeKVMemory(IDENTITY.num_layers, world.source.num_blocks, form.num_bytes)
        for layer in range(IDENTITY.num_layers):
            for kv in (0, 1):
                numbers = read(world.source, whole, list(range(world.source.num_blocks)), layer, kv).heads(
                    heads.start, heads.stop
                )
                for block, raw in enumerate(form.pack(numbers, is_value=bool(kv))):
                    self.memory.block_view(layer, kv, block)[:] = raw.tobytes()

    def __enter__(self) -> FakeKVMemory:
        return self.memory

    def __exit__(self, *_: object) -> None:
        self.memory.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"arrangement": "panels"}, "layout.arrangement"),
        ({"kv_dtype": "float8_e5m2"}, "layout.kv_dtype"),
        ({"block_size": 0}, "layout.block_size"),
        ({"tensor_parallel_size": 3}, "layout.tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "tensor_parallel_rank": 2}, "layout.tensor_parallel_rank"),
    ],
)
def test_layouts_that_do_not_convert_are_named(changes: dict[str, object], field: str) -> None:
    theirs = make_layout()
    for name, value in changes.items():
        setattr(theirs, name, value)
    with pytest.raises(TransferRefused) as raised:
        check_layout(IDENTITY, make_layout(), theirs)
    assert (raised.value.code, raised.value.field) == (grpc.StatusCode.FAILED_PRECONDITION, field)


async def test_a_corrupt_part_is_not_converted(transport: str) -> None:
    source, target = PAIRS["bf16 to int8"]
    with nothing_left():
        async with running(make_world(transport, source, target)) as world:
            world.job(num_blocks=4)
            hello = world.hello("r1")
            hello.layout.CopyFrom(source)
            async with world.raw_peer(hello) as peer:
                assert not (await peer.send_part(Part(0, 0, 3, 0, 4), [0, 1, 2, 3], crc32c=1)).part_reply.ok
                assert bytes(world.target.memory()) == world.before


def test_shares_of_heads() -> None:
    layouts = [Layout(16, "bfloat16", 2, rank) for rank in (0, 1)]
    assert [layout.heads(4) for layout in layouts] == [range(2), range(2, 4)]
    quarter = replace(layouts[0], tensor_parallel_size=4)
    assert quarter.ranks_with(range(1, 3), 4) == range(1, 3)
    assert layouts[0].ranks_with(range(4), 4) == range(2)


async def test_fencing_holds_while_parts_are_converted(transport: str) -> None:
    source, target = PAIRS["larger blocks"]
    with nothing_left():
        async with running(make_world(transport, source, target)) as world:
            job = world.job(num_blocks=5, feed=KVReadiness())
            push = asyncio.create_task(world.sender.push(job, timeout_s=10))
            job.feed.advance(Ready(2, 2, 0))
            await until(lambda: bytes(world.target.memory()) != world.before, "a part is written")
            world.delegate.held["r1"].state = replace(world.delegate.held["r1"].state, attempt=9)
            await world.receiver.quiesce("r1")
            frozen = bytes(world.target.memory())
            num_blocks = len(job.source_block_ids)
            job.feed.advance(Ready(num_blocks, num_blocks, IDENTITY.num_layers))
            job.feed.end(FirstTokensDrawn(CHOICES))
            with pytest.raises(PushFailed):
                await push
            assert bytes(world.target.memory()) == frozen
