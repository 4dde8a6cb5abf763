"""What is particular to nixl: which metadata and memory are taken, reads that do not end, and life without the package."""

import importlib

import pytest

from kvtransfer.errors import PushFailed
from kvtransfer.manifest import Part
from kvtransfer.native.library import address_of
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.transports.nixl import agent as nixl_agent
from kvtransfer.transports.nixl.agent import Agent, NixlUnusable, Place
from kvtransfer.transports.nixl.device import MAX_METADATA_BYTES
from kvtransfer.transports.nixl.transport import NixlTransport
from pdmesh.v1 import transfer_pb2
from tests.kvtransfer.endpoints import World, nothing_left, running
from tests.support.nixl import NEEDS_NIXL

BOTH = ("nixl", "tcp")


def both_transports(world: World) -> World:
    world.receiver = Receiver(world.target, world.delegate, world.identity, world.layout, transports=BOTH)
    return world


@NEEDS_NIXL
async def test_nixl_is_preferred_where_it_is_offered() -> None:
    with nothing_left():
        async with running(both_transports(World("tcp"))) as world:
            assert [endpoint.transport for endpoint in world.receiver.endpoints()] == ["nixl", "tcp"]
            job = world.job()
            assert (await world.sender.push(job, timeout_s=10)).transport == "nixl"
            world.check_arrived(job)


async def test_without_the_package_a_worker_starts_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    nixl_agent.bindings.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(nixl_agent, "find_spec", lambda name: None)
    with nothing_left():
        async with running(both_transports(World("tcp"))) as world:
            assert [endpoint.transport for endpoint in world.receiver.endpoints()] == ["tcp"]
            assert (await world.sender.push(world.job(), timeout_s=10)).transport == "tcp"
    assert sum("nixl is not used: the package does not load" in line for line in caplog.messages) == 1


async def test_a_sender_whose_agent_cannot_be_opened_takes_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport, calls = NixlTransport(), []

    def broken(*place: int | Place) -> Agent:
        calls.append(place)
        raise NixlUnusable("no device")

    monkeypatch.setattr("kvtransfer.transports.nixl.transport.Agent", broken)
    monkeypatch.setattr("kvtransfer.transports.nixl.transport.is_installed", lambda: True)
    with nothing_left():
        async with running(World("tcp")) as world:
            world.sender._transports = {"nixl": transport, "tcp": world.transports["tcp"]}
            for name in ("r1", "r2"):
                job = world.job(name)
                endpoint = job.reservation.endpoints.add()
                endpoint.CopyFrom(job.reservation.endpoints[0])
                endpoint.transport = "nixl"
                assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
    assert len(calls) == 1 and sum("no device" in line for line in caplog.messages) == 1


@NEEDS_NIXL
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("nixl_metadata", b"", "hello.nixl_metadata: 0 bytes are not"),
        ("nixl_metadata", b"x" * (MAX_METADATA_BYTES + 1), "hello.nixl_metadata: 65537 bytes are not"),
        ("pool_address", 0, "hello.pool_address: no pool of 196608 bytes lies at 0x0"),
        ("pool_address", (1 << 64) - 1, "hello.pool_address: no pool of"),
        ("pool_num_blocks", 0, "hello.pool_num_blocks: 0"),
    ],
)
async def test_a_hello_that_describes_no_pool_is_refused(field: str, value: object, message: str) -> None:
    with nothing_left():
        async with running(World("nixl")) as world:
            world.job()
            async with world.raw_peer() as peer:
                hello = with_pool(world, {field: value})
                await peer.send(hello=hello)
                reply = (await peer.stream.read_message()).hello_reply
                assert reply.code and reply.message.startswith(message)
            assert world.delegate.events == []


def with_pool(world: World, changes: dict[str, object]) -> transfer_pb2.TransferHello:
    """A hello whose pool is described, with `changes`; the metadata is none."""
    fields: dict[str, object] = {"nixl_metadata": b"none", "pool_address": 1 << 20, "pool_num_blocks": 64}
    hello = world.hello("r1")
    for name, value in (fields | changes).items():
        setattr(hello, name, value)
    return hello


@NEEDS_NIXL
async def test_metadata_that_nixl_does_not_take_ends_the_attempt_and_the_next_one_takes_another_transport() -> None:
    with nothing_left():
        async with running(both_transports(World("tcp"))) as world:
            job = world.job()
            nixl = world.sender._transports["nixl"]
            assert isinstance(nixl, NixlTransport)
            nixl._agent_of(world.source).metadata = b"of a version that nobody knows"
            with pytest.raises(PushFailed, match=r"hello\.nixl_metadata") as raised:
                await world.sender.push(job, timeout_s=10)
            assert raised.value.retryable
            job.reservation.CopyFrom(world.reservation("r1"))
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
            world.check_arrived(job)


@NEEDS_NIXL
@pytest.mark.parametrize(("num_blocks", "offset"), [(64, 1 << 20), (1 << 20, 0)], ids=["elsewhere", "larger than it is"])
async def test_memory_that_is_not_registered_is_not_read(num_blocks: int, offset: int) -> None:
    with nothing_left():
        async with running(World("nixl")) as world:
            world.job()
            hello = world.hello("r1")
            agent = Agent(address_of(world.source.memory()), world.source.num_bytes)
            hello.nixl_metadata, hello.pool_num_blocks = agent.metadata, num_blocks
            hello.pool_address = address_of(world.source.memory()) + offset
            async with world.raw_peer() as peer:
                await peer.send(hello=hello)
                assert (await peer.stream.read_message()).hello_reply.code == 0
                header = peer.header(Part(0, 0, 1, 0, 2))
                header.source_block_ids[:] = [0, num_blocks - 1]
                await peer.send(part=header)
                _, message = await peer.verdict()
                assert message.startswith("hello.pool_address: ")
            agent.close()
            world.check_untouched(set(range(world.target.num_blocks)))


@NEEDS_NIXL
async def test_block_ids_outside_the_senders_pool_are_refused() -> None:
    with nothing_left():
        async with running(World("nixl")) as world:
            world.job()
            async with world.raw_peer(world.hello("r1")) as peer:
                header = peer.header(Part(0, 0, 1, 0, 2))
                header.source_block_ids[:] = [0, 64]
                await peer.send(part=header)
                _, message = await peer.verdict()
                assert message == "part.source_block_ids: 64 is outside the pool of 64 blocks"
