"""What is particular to cuda_ipc: whose pools are opened, when tcp steps in, and what the device may still do when a push ends.

Shared memory of the host stands where a GPU's would be; everything around it is what a GPU gets.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import PushFailed
from kvtransfer.manifest import KVMemory, Part
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.send_queue import FirstTokensDrawn, KVReadiness, Ready
from kvtransfer.sender.sender import Sender
from kvtransfer.staging import StagedMemory
from kvtransfer.transports import common
from kvtransfer.transports.common import OpenedPools
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from pdmesh.engine.kv_cache.block_moves import Blocks
from pdmesh.engine.kv_cache.cuda_ipc import NotShared
from pdmesh.engine.kv_cache.ipc_pool import IndexedSums, PeerPool, ShownPool
from pdmesh.engine.kv_cache.streams import InOrder, Streams
from pdmesh.v1 import transfer_pb2
from tests.kvtransfer.endpoints import CHOICES, World, nothing_left, running, until
from tests.kvtransfer.staged_world import at_work, do_all
from tests.support.host_sharing import HostSharing, pool_of, staged
from tests.support.kv_memory import SEALS, FakeKVMemory, make_layout
from tests.support.reordering import ReorderingStreams

BOTH = ("cuda_ipc", "shm", "tcp")
LAYERS, BLOCKS = 3, 20


def also_by_others(world: World) -> World:
    world.receiver = Receiver(world.seen_target, world.delegate, world.identity, world.layout, transports=BOTH)
    return world


@asynccontextmanager
async def on_devices(streams: Streams, world: World | None = None) -> AsyncIterator[World]:
    """Both pools on devices that do things when they like."""
    with nothing_left():
        world = world or World("cuda_ipc")
        world.seen_source, world.seen_target = (
            staged(memory, world.layout.block_size, streams) for memory in (world.source, world.target)
        )
        world.sender = world.make_sender()
        transports = (world.transport,)
        world.receiver = Receiver(world.seen_target, world.delegate, world.identity, world.layout, transports=transports)
        async with running(world):
            yield world


def shown(memory: KVMemory) -> ShownPool:
    assert isinstance(memory, StagedMemory) and memory.shown is not None
    return memory.shown


async def test_it_is_preferred_and_opens_a_pool_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "KEEP_S", 0.2)
    with nothing_left():
        async with running(also_by_others(World("cuda_ipc"))) as world:
            assert [endpoint.transport for endpoint in world.receiver.endpoints()] == list(BOTH)
            sharing = shown(world.seen_target)._sharing
            assert isinstance(sharing, HostSharing)
            for index in range(3):
                job = world.job(f"r{index}", start=20 * index)
                assert (await world.sender.push(job, timeout_s=10)).transport == "cuda_ipc"
            assert sharing.num_opened == 1
            world.sender._epoch = 8  # it has started anew
            await world.sender.push(world.job("r3"), timeout_s=10)
            assert sharing.num_opened == 2


async def test_pushes_side_by_side() -> None:
    streams = ReorderingStreams()
    with at_work(streams, seed=3):
        async with on_devices(streams) as world:
            jobs = [world.job(f"r{index}", num_blocks=8, first_block=2, start=8 * index, spread=True) for index in range(7)]
            results = await asyncio.gather(*(world.sender.push(job, timeout_s=10) for job in jobs))
            assert {result.transport for result in results} == {"cuda_ipc"}
            pairs = [(job, world.delegate.held[job.reservation.reservation_id]) for job in jobs]
            for job, held in pairs:
                for source_id, target_id in list(zip(job.source_block_ids, held.block_ids, strict=True))[2:]:
                    assert world.source.block_bytes(source_id) == world.target.block_bytes(target_id)
            written = {target_id for _, held in pairs for target_id in held.block_ids[2:]}
            world.check_untouched(set(range(world.target.num_blocks)) - written)


async def test_parts_are_not_as_small_as_a_piece() -> None:
    with nothing_left():
        async with running(World("cuda_ipc")) as world:
            world.sender = Sender(world.seen_source, world.identity, world.layout, 7)
            assert (await world.sender.push(world.job(), timeout_s=10)).num_parts == 1


async def test_other_layouts_go_over_tcp_in_the_same_push() -> None:
    with nothing_left():
        world = also_by_others(World("cuda_ipc", layout=make_layout(8), source_layout=make_layout(16)))
        async with running(world):
            result = await world.sender.push(world.job(num_blocks=6), timeout_s=10)
            assert result.transport == "tcp" and world.delegate.kinds() == ["open", "commit"]


@pytest.mark.parametrize("why", ["no handle", "another device", "a process that has ended"])
async def test_pools_that_cannot_be_opened_go_over_tcp_in_the_same_push(why: str) -> None:
    with nothing_left():
        async with running(also_by_others(World("cuda_ipc"))) as world:
            source = world.seen_source
            assert isinstance(source, StagedMemory)
            handle = shown(source).handle
            if why == "no handle":
                source.shown = None
            elif why == "another device":
                shown(source).handle = type(handle)(handle.handle, handle.offset, b"elsewhere")
            else:
                shown(source).handle = type(handle)(b"\xff\xff\xff\x7f" + handle.handle[4:], handle.offset, handle.device)
            job = world.job()
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
            world.check_arrived(job)


async def test_a_stranger_on_the_host_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        async with running(also_by_others(World("cuda_ipc"))) as world:
            job = world.job()
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"


async def test_a_pool_that_is_not_shown_is_not_offered() -> None:
    memory = FakeKVMemory(1, 4, 512)
    with pytest.raises(NotShared, match="handle"):
        ShownPool(pool_of(memory, 16), HostSharing(None), InOrder(), IndexedSums())
    assert not CudaIpcTransport().receives(memory)
    with pytest.raises(NotShared, match="whole words"):
        ShownPool(torch.zeros((1, 2, 4, 1, 1, 12), dtype=torch.int8), HostSharing(memory.fd), InOrder(), IndexedSums())
    memory.close()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("handle", b"", "hello.device_pool.handle: 0 bytes are not 1 to 256"),
        ("handle", b"x" * 257, "hello.device_pool.handle: 257 bytes"),
        ("handle", b"x" * 7, "hello.device_pool.handle: 7 bytes are not"),
        ("device", b"", "hello.device_pool.device: "),
        ("offset", 1 << 20, "hello.device_pool.offset: a pool of 196608 bytes"),
        ("pool_num_blocks", 0, "hello.pool_num_blocks: 0"),
        ("pool_num_blocks", 65, "hello.device_pool.offset: a pool of 199680 bytes at 0 leads out of 196608"),
        ("pool_num_blocks", 0xFFFFFFFF, "hello.device_pool.offset: a pool of"),
    ],
)
async def test_a_hello_that_describes_no_pool_is_refused(field: str, value: object, message: str) -> None:
    with nothing_left():
        async with running(World("cuda_ipc")) as world:
            world.job()
            hello, handle = world.hello("r1"), shown(world.seen_source).handle
            hello.pool_num_blocks = 64
            hello.device_pool.CopyFrom(transfer_pb2.DevicePool(handle=handle.handle, device=handle.device))
            setattr(hello if field == "pool_num_blocks" else hello.device_pool, field, value)
            async with world.raw_peer() as peer:
                await peer.send(hello=hello)
                reply = (await peer.stream.read_message()).hello_reply
                assert reply.code and reply.message.startswith(message)
            assert world.delegate.events == []


async def test_block_ids_outside_the_senders_pool_are_refused() -> None:
    with nothing_left():
        async with running(World("cuda_ipc")) as world:
            world.job()
            async with world.raw_peer(world.hello("r1")) as peer:
                header = peer.header(Part(0, 0, 1, 0, 2))
                header.source_block_ids[:] = [0, 64]
                await peer.send(part=header)
                await peer.send(part_end=transfer_pb2.PartEnd(word_sum=1))
                _, message = await peer.verdict()
                assert message == "part.source_block_ids: 64 is outside the pool of 64 blocks"
            world.check_untouched(set(range(world.target.num_blocks)))


async def test_what_has_changed_since_it_was_announced_is_no_part_and_touches_nothing_else() -> None:
    """A sender that was paused, and whose blocks were given to others meanwhile."""
    with nothing_left():
        async with running(World("cuda_ipc")) as world:
            world.job(num_blocks=4)
            part = Part(0, 0, LAYERS, 0, 4)
            async with world.raw_peer(world.hello("r1")) as peer:
                answer = await peer.send_part(part, [0, 1, 2, 3], crc32c=1)
                assert not answer.part_reply.ok and answer.part_reply.message.startswith("part_end: ")
                held = world.delegate.held["r1"]
                world.check_untouched(set(range(world.target.num_blocks)) - set(held.block_ids))
                assert (await peer.send_part(part, [0, 1, 2, 3])).part_reply.ok
            for source_id, target_id in enumerate(held.block_ids):
                assert world.source.block_bytes(source_id) == world.target.block_bytes(target_id)


async def test_a_sender_that_falls_silent_within_a_part_keeps_nobody_from_anything() -> None:
    with nothing_left():
        async with running(World("cuda_ipc")) as world:
            world.job("silent", start=30)
            async with world.raw_peer(world.hello("silent")) as peer:
                header = peer.header(Part(0, 0, 1, 0, 2))
                header.source_block_ids[:] = [0, 1]
                await peer.send(part=header)
                job = world.job()
                assert (await world.sender.push(job, timeout_s=2)).committed
            held = [world.delegate.held[name].block_ids for name in ("r1", "silent")]
            for source_id, target_id in zip(job.source_block_ids, held[0], strict=True):
                assert world.source.block_bytes(source_id) == world.target.block_bytes(target_id)
            world.check_untouched(set(range(world.target.num_blocks)) - {*held[0], *held[1][:2]})


async def test_a_device_that_fails_costs_the_attempt_and_the_next_one_goes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(copies: IndexedSums, source: Blocks, target: Blocks, sums: Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(IndexedSums, "copy", fail)
    with nothing_left():
        async with running(also_by_others(World("cuda_ipc"))) as world:
            job = world.job()
            with pytest.raises(PushFailed, match="part: the device could not read it: CUDA error") as raised:
                await world.sender.push(job, timeout_s=10)
            assert raised.value.retryable
            await until(lambda: "failed" in world.delegate.kinds(), "the attempt has failed")
            job.reservation.CopyFrom(world.reservation("r1"))
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
            world.check_arrived(job)


async def test_a_sum_that_fails_costs_the_attempt_and_the_next_one_goes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(copies: IndexedSums, blocks: Blocks, sums: Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(IndexedSums, "sum", fail)
    with nothing_left():
        async with running(also_by_others(World("cuda_ipc"))) as world:
            job = world.job()
            with pytest.raises(PushFailed, match="our device could not sum a part: CUDA error") as raised:
                await world.sender.push(job, timeout_s=10)
            assert raised.value.retryable
            await until(lambda: "failed" in world.delegate.kinds(), "the attempt has failed")
            job.reservation.CopyFrom(world.reservation("r1"))
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_told_as_it_is_launched_is_read_as_it_is_computed(seed: int) -> None:
    streams, chance = ReorderingStreams(), random.Random(seed)
    async with on_devices(streams) as world:
        source, marks = pool_of(world.source, world.layout.block_size), _staged(world.seen_source).marks
        final = source.clone()
        source.zero_()
        job = world.job(feed=KVReadiness())
        with at_work(streams, seed):
            push = asyncio.create_task(world.sender.push(job, timeout_s=10))
            for first, end in ((0, 7), (7, 14), (14, BLOCKS)):
                marks.begin()
                for layer in range(LAYERS):
                    for block in job.source_block_ids[first:end]:
                        streams.compute(partial(_write, source, final, layer, block))
                    marks.reach(layer + 1)
                    job.feed.advance(Ready(first, end, layer + 1))
                    await asyncio.sleep(0.002 * chance.random())
                job.feed.advance(Ready(end, end, LAYERS))
            job.feed.end(FirstTokensDrawn(CHOICES))
            assert (await push).committed
        assert torch.equal(source[:, :, :BLOCKS], final[:, :, :BLOCKS])
        world.check_arrived(job)


def _staged(memory: KVMemory) -> StagedMemory:
    assert isinstance(memory, StagedMemory)
    return memory


def _write(pool: Tensor, final: Tensor, layer: int, block: int) -> None:
    pool[layer, :, block] = final[layer, :, block]


async def test_a_cancelled_push_ends_when_its_device_reads_its_blocks_no_more() -> None:
    streams = ReorderingStreams()
    async with on_devices(streams) as world:
        push = asyncio.create_task(world.sender.push(world.job(), timeout_s=10))
        await until(lambda: not streams.is_idle, "a part is summed")
        push.cancel()
        await asyncio.sleep(0.05)
        assert not push.done()
        do_all(streams)
        with pytest.raises(asyncio.CancelledError):
            await push


async def test_blocks_are_given_away_when_nothing_writes_to_them() -> None:
    near, far = InOrder(), ReorderingStreams()
    async with on_devices(near) as world:
        world.seen_target = staged(world.target, world.layout.block_size, far)
        world.receiver._shared.__dict__["memory"] = world.seen_target
        push = asyncio.create_task(world.sender.push(world.job(), timeout_s=10))
        await until(lambda: not far.is_idle, "a part is read")
        quiesce = asyncio.create_task(world.receiver.quiesce("r1"))
        await asyncio.sleep(0.05)
        assert not quiesce.done()
        do_all(far)
        await quiesce
        before = bytes(world.target.memory())
        do_all(far)
        with pytest.raises(PushFailed):
            await push
        do_all(far)
        assert bytes(world.target.memory()) == before


async def test_what_arrives_outlasts_steps_that_were_launched_before_the_push() -> None:
    """They may write to blocks that were given away under them: pdmesh/engine/runner/overlap.py."""
    streams = ReorderingStreams()
    async with on_devices(streams) as world:
        job, target = world.job(), pool_of(world.target, world.layout.block_size)
        for block in world.delegate.held["r1"].block_ids:
            streams.compute(partial(_spoil, target, block))
        push = asyncio.create_task(world.sender.push(job, timeout_s=10))
        while not push.done():
            streams.advance(lambda count: count - 1)  # copies first, wherever they may
            await asyncio.sleep(0.001)
        assert push.result().committed
        world.check_arrived(job)


def _spoil(pool: Tensor, block: int) -> None:
    pool[:, :, block, 0] = -1


async def test_a_push_that_waits_for_the_device_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "ALIVE_S", 0.01)
    streams, signs = ReorderingStreams(), list[str]()
    async with on_devices(streams) as world:
        job = world.job()
        world.delegate.on_progress = lambda target: signs.append(target.reservation_id)
        push = asyncio.create_task(world.sender.push(job, timeout_s=10))
        await until(lambda: len(signs) >= 3, "the lease is kept, though nothing has been announced")
        with at_work(streams):
            assert (await push).committed
        world.check_arrived(job)


async def test_a_pool_that_several_ask_for_at_once_is_opened_once() -> None:
    memory, pools = FakeKVMemory(1, 2, 512, seals=SEALS), OpenedPools()
    sharing = HostSharing(memory.fd)
    pool = ShownPool(pool_of(memory, 16), sharing, InOrder(), IndexedSums(), 1 << 16)

    async def opened() -> PeerPool:
        await asyncio.sleep(0)
        return pool.open(pool.handle, 2)

    first, second = await asyncio.gather(pools.acquire((1,), opened), pools.acquire((1,), opened))
    assert first is second and sharing.num_opened == 1
    assert await pools.acquire((2,), opened) is not first
    pools.release(first)
    pools.release(second)
    assert len(pools) == 1
    pool.close()
    memory.close()


async def test_a_pool_that_could_not_be_opened_is_tried_again() -> None:
    pools, memory = OpenedPools(), FakeKVMemory(1, 2, 512, seals=SEALS)
    pool = ShownPool(pool_of(memory, 16), HostSharing(memory.fd), InOrder(), IndexedSums(), 1 << 16)

    async def failing() -> PeerPool:
        raise NotShared("handle", "it is of a process that has ended")

    async def opened() -> PeerPool:
        return pool.open(pool.handle, 2)

    with pytest.raises(NotShared, match="ended"):
        await pools.acquire((1,), failing)
    assert len(pools) == 0
    pools.release(await pools.acquire((1,), opened))
    pool.close()
    memory.close()


def test_ids_outside_a_pool_and_too_many_are_refused() -> None:
    memory, streams = FakeKVMemory(2, 8, 512), InOrder()
    pool = ShownPool(pool_of(memory, 16), HostSharing(memory.fd), streams, IndexedSums(), 4096)
    peer = pool.open(pool.handle, 8)
    cases = {"source_ids": ([8], [1]), "block_ids: 1": ([1], [-1]), "block_ids: 5 are more than 4": ([1] * 5, [1] * 5)}
    for message, (source_ids, block_ids) in cases.items():
        with pytest.raises(ValueError, match=message):
            pool.pull(peer, source_ids, range(2), block_ids, streams.mark())
    pool.close()
    memory.close()
