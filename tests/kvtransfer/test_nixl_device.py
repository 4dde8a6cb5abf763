"""What is particular to nixl between pools on devices: when tcp steps in, and what may still come when a push has ended.

Memory of the host stands where a GPU's would be, for NIXL, too; everything around it is what a GPU gets.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
import torch
from torch import Tensor

from kvtransfer.errors import PushFailed
from kvtransfer.manifest import Part
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.reservation import Mode, NewAttempt, transition
from kvtransfer.sender.sender import part_bytes_over
from kvtransfer.staging import StagedMemory
from kvtransfer.transports.nixl import device
from kvtransfer.transports.nixl import transport as nixl_transport
from kvtransfer.transports.nixl.agent import Place
from kvtransfer.transports.nixl.device import NUM_ROOMS, DeviceReader
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.registry import transports_with
from pdmesh.engine.kv_cache.block_moves import Blocks
from pdmesh.engine.kv_cache.ipc_pool import IndexedSums, ShownPool
from pdmesh.engine.kv_cache.streams import InOrder
from pdmesh.v1 import transfer_pb2
from tests.kvtransfer.endpoints import RawPeer, World, nothing_left, running, until
from tests.kvtransfer.test_nixl_reader import Source, source_process
from tests.support.host_sharing import HostSharing, pool_of, staged
from tests.support.kv_memory import SEALS, FakeKVMemory, make_layout
from tests.support.nixl import NEEDS_NIXL

ROOM_BYTES = 64 << 10
BOTH = ("nixl", "tcp")


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ROOM_BYTES", ROOM_BYTES)


def also_by_tcp(world: World) -> World:
    world.receiver = Receiver(world.seen_target, world.delegate, world.identity, world.layout, transports=BOTH)
    return world


def reader_of(world: World) -> DeviceReader:
    transport = world.receiver._transports[0]
    assert isinstance(transport, NixlTransport) and transport._device_reader is not None
    return transport._device_reader


@NEEDS_NIXL
async def test_it_is_preferred_and_gives_its_rooms_back() -> None:
    with nothing_left():
        async with running(also_by_tcp(World("nixl+device"))) as world:
            assert [endpoint.transport for endpoint in world.receiver.endpoints()] == list(BOTH)
            job = world.job(spread=True)
            assert (await world.sender.push(job, timeout_s=10)).transport == "nixl"
            world.check_arrived(job)
            assert reader_of(world).num_free == NUM_ROOMS


@NEEDS_NIXL
@pytest.mark.parametrize("on_device", ["sender", "receiver"])
async def test_between_a_device_and_the_host_tcp_takes_the_same_push(on_device: str) -> None:
    with nothing_left():
        world = World("nixl+device")
        if on_device == "sender":
            plain, world.seen_target = world.seen_target, world.target
        else:
            plain, world.seen_source = world.seen_source, world.source
        assert isinstance(plain, StagedMemory)
        plain.close()
        world.sender = world.make_sender()
        async with running(also_by_tcp(world)):
            job = world.job()
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
            world.check_arrived(job)
            assert world.delegate.kinds() == ["open", "commit"]


@NEEDS_NIXL
async def test_other_layouts_go_over_tcp_in_the_same_push() -> None:
    with nothing_left():
        world = also_by_tcp(World("nixl+device", layout=make_layout(8), source_layout=make_layout(16)))
        async with running(world):
            result = await world.sender.push(world.job(num_blocks=6), timeout_s=10)
            assert result.transport == "tcp" and world.delegate.kinds() == ["open", "commit"]


def test_a_pool_on_a_device_that_is_not_shown_takes_no_part() -> None:
    memory = FakeKVMemory(1, 4, 512, seals=SEALS)
    seen = staged(memory, 16)
    shown, seen.shown = seen.shown, None
    assert not NixlTransport().receives(seen) and not NixlTransport().sends(seen)
    seen.shown = shown
    known = transports_with(None)
    assert part_bytes_over(known["nixl"], seen, None) > part_bytes_over(known["tcp"], seen, None)
    seen.close()
    memory.close()


@NEEDS_NIXL
@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_where_nixl_cannot_do_with_memory_of_the_device_tcp_takes_the_same_push(
    who: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It finds that this is memory of the host."""

    def on_gpu(shown: ShownPool) -> Place:
        return Place("VRAM", 0)

    with nothing_left():
        world = World("nixl+device")
        if who == "receiver":
            monkeypatch.setattr(device, "place_of", on_gpu)
        async with running(also_by_tcp(world)):
            if who == "sender":
                monkeypatch.setattr(nixl_transport, "place_of", on_gpu)
            job = world.job()
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
            world.check_arrived(job)
    said = [line for line in caplog.messages if line.startswith("nixl is not used: no agent over UCX with")]
    assert len(said) == 1 and "bytes of VRAM" in said[0]


@NEEDS_NIXL
@pytest.mark.parametrize(
    ("kind", "message"), [(None, "hello.nixl_device: the sender's pool"), ("FILE", "hello.nixl_device.kind: 'FILE' is none of")]
)
async def test_a_hello_that_describes_no_pool_of_a_device_is_refused(kind: str | None, message: str) -> None:
    with nothing_left():
        async with running(World("nixl+device")) as world:
            world.job()
            hello = world.hello("r1")
            hello.nixl_metadata, hello.pool_address, hello.pool_num_blocks = b"none", 1 << 20, 64
            if kind is not None:
                hello.nixl_device.kind = kind
            async with world.raw_peer() as peer:
                await peer.send(hello=hello)
                reply = (await peer.stream.read_message()).hello_reply
                assert reply.code and reply.message.startswith(message)
            assert world.delegate.events == []


@NEEDS_NIXL
async def test_a_part_larger_than_a_room_and_ids_outside_the_pool_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        async with running(World("nixl+device")) as world:
            for ids, room_bytes, expected in (
                ([0, 64], ROOM_BYTES, "part.source_block_ids: 64 is outside the pool of 64 blocks"),
                ([0, 1], 64, "part.num_bytes: "),
            ):
                monkeypatch.setattr(device, "ROOM_BYTES", room_bytes)
                world.job(name := f"r{room_bytes}")
                async with world.raw_peer(world.hello(name)) as peer:
                    header = peer.header(Part(0, 0, 1, 0, 2))
                    header.source_block_ids[:] = ids
                    await peer.send(part=header)
                    assert (await peer.verdict())[1].startswith(expected)
            world.check_untouched(set(range(world.target.num_blocks)))


@NEEDS_NIXL
async def test_a_device_that_fails_costs_the_attempt_and_the_next_one_goes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(copies: IndexedSums, source: Blocks, target: Blocks, sums: Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(IndexedSums, "copy", fail)
    with nothing_left():
        async with running(also_by_tcp(World("nixl+device"))) as world:
            job = world.job()
            with pytest.raises(PushFailed, match="part: the device could not read it: CUDA error"):
                await world.sender.push(job, timeout_s=10)
            await until(lambda: "failed" in world.delegate.kinds(), "the attempt has failed")
            assert reader_of(world).num_free == NUM_ROOMS
            job.reservation.CopyFrom(world.reservation("r1"))
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
            world.check_arrived(job)


def hello_of(world: World, source: Source, name: str = "r1") -> transfer_pb2.TransferHello:
    """Of a sender whose pool is the source's."""
    hello = world.hello(name)
    hello.nixl_metadata, hello.pool_address, hello.pool_num_blocks = source.metadata, source.address, world.source.num_blocks
    hello.nixl_device.kind = "DRAM"
    return hello


async def begin(world: World, peer: RawPeer, source: Source, name: str = "r1") -> None:
    """A part is announced."""
    await peer.send(hello=hello_of(world, source, name))
    assert (await peer.stream.read_message()).hello_reply.code == 0
    header = peer.header(Part(0, 0, 3, 0, 20))
    header.source_block_ids[:] = range(20)
    await peer.send(part=header)


@NEEDS_NIXL
async def test_a_source_that_is_paused_keeps_a_room_and_nothing_else() -> None:
    with nothing_left():
        async with running(World("nixl+device")) as world:
            with source_process(world.source.num_bytes) as source:
                world.job("paused", start=30)
                source.stop()
                reader = reader_of(world)
                async with world.raw_peer() as peer:
                    await begin(world, peer, source, "paused")
                    await until(lambda: reader.num_free < NUM_ROOMS, "the read is under way")
                    held = world.delegate.held["paused"]
                    held.state = transition(held.state, NewAttempt(2, Mode.LOCAL), time.monotonic())
                    await asyncio.wait_for(world.receiver.quiesce("paused"), 2)
                    assert bytes(world.target.memory()) == world.before
                    assert reader.num_free == NUM_ROOMS - 1  # it is still being read into
                job = world.job()
                assert (await world.sender.push(job, timeout_s=10)).transport == "nixl"
                world.check_arrived(job)
                source.go_on()
                await until(lambda: tidied(reader), "the read ends")
            world.check_arrived(job)


@NEEDS_NIXL
async def test_when_no_room_becomes_free_the_attempt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "NUM_ROOMS", 1)
    monkeypatch.setattr(device, "ROOM_S", 0.1)
    with nothing_left():
        async with running(also_by_tcp(World("nixl+device"))) as world:
            with source_process(world.source.num_bytes) as source:
                world.job("paused", start=30)
                source.stop()
                reader = reader_of(world)
                async with world.raw_peer() as peer:
                    await begin(world, peer, source, "paused")
                    await until(lambda: not reader.num_free, "the read is under way")
                    job = world.job()
                    with pytest.raises(PushFailed, match="part: none of our 1 rooms"):
                        await world.sender.push(job, timeout_s=10)
                    await until(lambda: "failed" in world.delegate.kinds(), "the attempt has failed")
                    job.reservation.CopyFrom(world.reservation("r1"))
                    assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
                source.go_on()
                await until(lambda: tidied(reader, 1), "the read ends")


@NEEDS_NIXL
async def test_a_source_that_dies_within_a_part_is_refused_and_gives_its_room_back() -> None:
    with nothing_left():
        async with running(World("nixl+device")) as world:
            with source_process(world.source.num_bytes) as source:
                world.job()
                source.stop()
                reader = reader_of(world)
                async with world.raw_peer() as peer:
                    await begin(world, peer, source)
                    await until(lambda: reader.num_free < NUM_ROOMS, "the read is under way")
                    source.child.kill()
                    code, message = await peer.verdict()
                    assert code is grpc.StatusCode.UNIMPLEMENTED and message.startswith("part: nixl could not read it: ")
                await until(lambda: tidied(reader), "its room is free")
            assert bytes(world.target.memory()) == world.before


def test_a_part_goes_out_of_a_room_as_it_travels() -> None:
    memory = FakeKVMemory(3, 8, 512, seals=SEALS)
    memory.fill(2)
    pool, streams = ShownPool(pool_of(memory, 16), HostSharing(memory.fd), InOrder(), IndexedSums(), 8192), InOrder()
    before, rooms = pool_of(memory, 16).clone(), pool.rooms(2, 8192)
    part = rooms.room(1)[: 2 * 2 * 3 * 64]
    part[:] = torch.arange(len(part)) * 0x1234567
    total = pool.store(rooms.room(1), range(1, 3), [7, 2, 3], streams.mark()).result()
    assert total == pool.sum(range(1, 3), [7, 2, 3], streams.mark()).result()
    expected = before.flatten(3).view(torch.int64)
    expected[1:3, :, [7, 2, 3]] = part.view(2, 2, 3, 64)
    assert torch.equal(pool_of(memory, 16).flatten(3).view(torch.int64), expected)
    assert rooms.address + 8192 == rooms.room(1).data_ptr()
    for ids, message in (([8], "block_ids: 8 to 8"), ([-1], "block_ids: -1"), ([0, 1, 2], "part: 1152 words")):
        with pytest.raises(ValueError, match=message):
            pool.store(rooms.room(0), range(3), ids, streams.mark())
    pool.close()
    memory.close()


def tidied(reader: DeviceReader, num_rooms: int = NUM_ROOMS) -> bool:
    """What is over is given back when somebody comes or goes."""
    with reader._lock:
        reader._tidy()
    return reader.num_free == num_rooms
