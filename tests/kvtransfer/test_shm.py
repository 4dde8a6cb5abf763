"""What is particular to shm: who may connect, which memory is mapped, and when tcp steps in."""

import asyncio
import fcntl
import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtransfer import framing
from kvtransfer.errors import PushFailed
from kvtransfer.manifest import shape_of
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import PushJob, Sender
from kvtransfer.transports import common
from pdmesh.platform import capabilities
from pdmesh.platform.capabilities import ABSTRACT_SOCKETS, MEMFD, PEER_CREDENTIALS
from pdmesh.v1 import common_pb2, transfer_pb2
from tests.kvtransfer.endpoints import World, nothing_left, running
from tests.support.kv_memory import SEALS, FakeKVMemory

BOTH = ("shm", "tcp")
NEEDED = (MEMFD, ABSTRACT_SOCKETS, PEER_CREDENTIALS)
needs_all = pytest.mark.skipif(not all(each.is_there for each in NEEDED), reason="shm needs seals and sockets as Linux has them")


def both_transports(world: World) -> World:
    world.receiver = Receiver(world.target, world.delegate, world.identity, world.layout, transports=BOTH)
    return world


def with_memory(world: World, *, seals: int = SEALS, shared: bool = True) -> FakeKVMemory:
    size = world.source.bytes_per_layer_block
    memory = FakeKVMemory(world.source.num_layers, world.source.num_blocks, size, seals=seals, shared=shared)
    memory.fill(1)
    return memory


async def push(world: World, job: PushJob, memory: FakeKVMemory) -> str:
    """The transport over which a sender on `memory` got `job` through."""
    sender: Sender = world.make_sender(memory=memory)
    try:
        return (await sender.push(job, timeout_s=10)).transport
    finally:
        await sender.close()
        memory.close()


@needs_all
async def test_shm_is_preferred() -> None:
    with nothing_left():
        async with running(both_transports(World("shm"))) as world:
            assert [endpoint.transport for endpoint in world.receiver.endpoints()] == ["shm", "tcp"]
            job = world.job()
            job.reservation.endpoints.reverse()
            assert (await world.sender.push(job, timeout_s=10)).transport == "shm"


@needs_all
@pytest.mark.parametrize(
    ("seals", "shared"),
    [(0, True), (fcntl.F_SEAL_GROW, True), (SEALS, False)],
    ids=["unsealed", "may shrink", "no fd"],
)
async def test_memory_that_cannot_be_shared_goes_over_tcp(seals: int, shared: bool) -> None:
    with nothing_left():
        async with running(both_transports(World("shm"))) as world:
            job = world.job()
            assert await push(world, job, with_memory(world, seals=seals, shared=shared)) == "tcp"
            world.check_arrived(job)
            assert world.delegate.kinds() == ["open", "commit"]


@needs_all
async def test_another_host_goes_over_tcp() -> None:
    with nothing_left():
        async with running(both_transports(World("shm"))) as world:
            job = world.job()
            job.reservation.endpoints[0].host_id = "elsewhere"
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"


@needs_all
async def test_no_common_transport_is_said() -> None:
    with nothing_left():
        async with running(World("shm")) as world:
            job = world.job()
            job.reservation.endpoints[0].host_id = "elsewhere"
            with pytest.raises(PushFailed, match="no transport that both ends offer: decode offers shm"):
                await world.sender.push(job, timeout_s=10)


@needs_all
async def test_a_socket_that_is_gone_goes_over_tcp() -> None:
    with nothing_left():
        async with running(both_transports(World("shm"))) as world:
            job = world.job()
            job.reservation.endpoints[0].address = "pdmesh-kv-gone"
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"


@needs_all
async def test_nothing_reachable_names_every_reason() -> None:
    with nothing_left():
        async with running(World("shm")) as world:
            job = world.job()
            del job.reservation.endpoints[:]
            job.reservation.endpoints.append(common_pb2.TransferEndpoint(transport="tcp", address="127.0.0.1:1"))
            job.reservation.endpoints.append(common_pb2.TransferEndpoint(transport="tcp", address="nonsense"))
            job.reservation.endpoints.append(common_pb2.TransferEndpoint(transport="pigeon"))
            with pytest.raises(PushFailed, match=r"127\.0\.0\.1:1: .*Connect call failed.*nonsense") as raised:
                await world.sender.push(job, timeout_s=10)
            assert raised.value.retryable


@needs_all
async def test_a_stranger_on_the_host_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        async with running(both_transports(World("shm"))) as world:
            job = world.job()
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"


def send_hello(address: str, hello: transfer_pb2.TransferHello, fds: list[int]) -> None:
    """A blocking peer that brings whatever descriptors the test gives it; returns when the receiver has answered."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect("\0" + address)
        frame = framing.encode(transfer_pb2.TransferMessage(hello=hello))
        socket.send_fds(sock, [frame], fds)
        header = sock.recv(framing.HEADER.size, socket.MSG_WAITALL)
        if not header:
            raise ConnectionError("closed")
        reply = framing.decode(header, sock.recv(framing.body_length(header), socket.MSG_WAITALL)).hello_reply
        raise PermissionError(reply.message)


@needs_all
@pytest.mark.parametrize(
    ("num_blocks", "count", "message"),
    [
        (63, 1, "has 196608 bytes"),
        (0, 1, "make 0"),
        (0xFFFFFFFF, 1, "has 196608 bytes"),
        (64, 0, "reset|closed"),
        (64, 2, "reset|closed"),
        (64, 9, "reset|closed"),
    ],
)
async def test_descriptors_that_do_not_fit_are_refused(num_blocks: int, count: int, message: str) -> None:
    with nothing_left():
        async with running(World("shm")) as world:
            world.job()
            hello = world.hello("r1")
            hello.pool_num_blocks = num_blocks
            address = world.receiver.endpoints()[0].address
            assert world.source.fd is not None
            with ThreadPoolExecutor(1) as executor, pytest.raises((ConnectionError, PermissionError), match=message):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(executor, send_hello, address, hello, [world.source.fd] * count)
            assert world.delegate.events == []


@needs_all
async def test_a_descriptor_that_is_no_memfd_is_refused() -> None:
    with nothing_left():
        async with running(World("shm")) as world:
            world.job()
            hello = world.hello("r1")
            hello.pool_num_blocks = 64
            with tempfile.TemporaryFile() as file, ThreadPoolExecutor(1) as executor:
                address = world.receiver.endpoints()[0].address
                with pytest.raises(PermissionError, match="not a sealable memfd"):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(executor, send_hello, address, hello, [file.fileno()])


@needs_all
async def test_block_ids_outside_the_senders_pool_are_refused() -> None:
    with nothing_left():
        async with running(World("shm")) as world:
            world.job()
            async with world.raw_peer(world.hello("r1")) as peer:
                part = transfer_pb2.PartHeader(layer_end=1, block_end=2, num_bytes=2048, source_block_ids=[0, 64])
                await peer.send(part=part)
                _, message = await peer.verdict()
                assert message == "part.source_block_ids: 64 is outside the pool of 64 blocks"
            await world.receiver.quiesce("r1")


@needs_all
def test_the_mapping_is_read_only() -> None:
    memory = FakeKVMemory(1, 2, 64)
    assert memory.fd is not None
    pool = common.MappedPool(memory.fd, shape_of(memory))
    with pool.view() as view:
        assert view.readonly and view.nbytes == 256
    pool.close()
    pool.close()
    memory.close()


@needs_all
async def test_a_pool_is_mapped_once_whatever_descriptor_leads_to_it() -> None:
    memory, other, pools = FakeKVMemory(1, 2, 64), FakeKVMemory(1, 2, 64), common.MappedPools()
    assert memory.fd is not None and other.fd is not None
    again = os.dup(memory.fd)
    first = pools.acquire(memory.fd, shape_of(memory))
    assert pools.acquire(again, shape_of(memory)) is first
    assert pools.acquire(other.fd, shape_of(other)) is not first
    pools.release(first)
    assert first.view().nbytes == 256
    pools.release(first)
    with pytest.raises(ValueError, match="closed"):
        first.view()
    assert len(pools) == 1
    os.close(again)
    memory.close()
    other.close()


@pytest.mark.parametrize("lost", [each.name for each in NEEDED])
async def test_without_what_it_needs_it_is_not_offered(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, lost)
    with nothing_left():
        async with running(both_transports(World("tcp"))) as world:
            assert [endpoint.transport for endpoint in world.receiver.endpoints()] == ["tcp"]
            job = world.job()
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
            world.check_arrived(job)


@needs_all
@pytest.mark.parametrize("lost", ["abstract_sockets", "peer_credentials"])
async def test_a_sender_that_lost_it_does_not_take_it(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        async with running(both_transports(World("shm"))) as world:
            job = world.job()
            assert [endpoint.transport for endpoint in job.reservation.endpoints] == ["shm", "tcp"]
            monkeypatch.setenv(capabilities.VARIABLE, lost)
            assert (await world.sender.push(job, timeout_s=10)).transport == "tcp"
            world.check_arrived(job)
