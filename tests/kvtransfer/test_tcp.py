"""What is particular to tcp: a network that cuts, flips and delays, through a proxy of our own."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from kvtransfer.errors import PushFailed
from kvtransfer.sender.sender import PushJob
from kvtransfer.stream import SocketStream
from tests.kvtransfer.endpoints import World, nothing_left, running, until


@dataclass
class Faults:
    """What happens to the bytes from sender to receiver; None: nothing. Offsets count from the start of the connection."""

    flip_at: int | None = None
    cut_at: int | None = None
    stall_at: int | None = None
    max_piece: int = 1 << 16


@asynccontextmanager
async def proxy(port: int, faults: Faults) -> AsyncIterator[int]:
    """Listens in front of `port`; yields its own port."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_forward(reader, far_writer, faults))
                group.create_task(_forward(far_reader, writer, Faults()))
        except* (OSError, EOFError):
            pass
        finally:
            for each in (writer, far_writer):
                each.close()
            try:
                await asyncio.gather(writer.wait_closed(), far_writer.wait_closed(), return_exceptions=True)
            finally:  # what a peer does not read would keep the socket open
                for each in (writer, far_writer):
                    each.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults) -> None:
    offset = 0
    while data := bytearray(await reader.read(faults.max_piece)):
        if faults.stall_at is not None and offset + len(data) > faults.stall_at:
            await asyncio.Event().wait()
        if faults.cut_at is not None and offset + len(data) > faults.cut_at:
            writer.write(data[: faults.cut_at - offset])
            await writer.drain()
            raise EOFError
        if faults.flip_at is not None and offset <= faults.flip_at < offset + len(data):
            data[faults.flip_at - offset] ^= 0x20
        offset += len(data)
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def through(job: PushJob, port: int) -> PushJob:
    job.reservation.endpoints[0].address = f"127.0.0.1:{port}"
    return job


@asynccontextmanager
async def proxied(faults: Faults, *, transport: str = "tcp", idle_timeout_s: float = 5.0) -> AsyncIterator[tuple[World, PushJob]]:
    with nothing_left():
        async with running(World(transport, idle_timeout_s=idle_timeout_s)) as world:
            job = world.job()
            port = int(job.reservation.endpoints[0].address.rpartition(":")[2])
            async with proxy(port, faults) as proxy_port:
                yield world, through(job, proxy_port)


async def test_small_pieces() -> None:
    async with proxied(Faults(max_piece=97)) as (world, job):
        await world.sender.push(job, timeout_s=20)
        world.check_arrived(job)


NUM_KV_BYTES = 20 * 3 * 2 * 512


@pytest.mark.parametrize("seed", range(25))
async def test_a_flipped_bit_is_never_committed(seed: int) -> None:
    flip_at = random.Random(seed).randrange(NUM_KV_BYTES)  # the commit, whose frame has no checksum of its own, comes later
    async with proxied(Faults(flip_at=flip_at), idle_timeout_s=0.3) as (world, job):
        with suppress(PushFailed):
            await world.sender.push(job, timeout_s=1)
        await until(lambda: world.receiver.num_connections == 0, "the session ends")
        if "commit" in world.delegate.kinds():
            world.check_arrived(job)


@pytest.mark.parametrize("seed", range(15))
async def test_a_cut_connection_fails_the_push(seed: int) -> None:
    cut_at = random.Random(seed).randrange(NUM_KV_BYTES)
    async with proxied(Faults(cut_at=cut_at)) as (world, job):
        with pytest.raises(PushFailed) as raised:
            await world.sender.push(job, timeout_s=10)
        assert raised.value.retryable
        await until(lambda: world.receiver.num_connections == 0, "the session ends")
        assert "commit" not in world.delegate.kinds()


async def test_a_link_that_stalls_in_the_middle_of_a_part() -> None:
    async with proxied(Faults(stall_at=NUM_KV_BYTES // 2, max_piece=1000), idle_timeout_s=0.2) as (world, job):
        push = asyncio.create_task(world.sender.push(job, timeout_s=10))
        await until(lambda: world.delegate.kinds() == ["open", "failed"], "the receiver's idle timeout")
        with pytest.raises(PushFailed):
            await push


async def test_sockets_do_not_wait_to_fill_segments() -> None:
    with nothing_left():
        async with running(World("tcp")) as world:
            world.job()
            async with world.raw_peer(world.hello("r1")) as peer:
                assert isinstance(peer.stream, SocketStream)
                assert peer.stream.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with nothing_left():
        world = World("tcp")
        world.receiver._host = "::1"
        async with running(world):
            assert world.receiver.endpoints()[0].address.startswith("[::1]:")
            job = world.job()
            await world.sender.push(job, timeout_s=10)
            world.check_arrived(job)


async def test_a_port_that_is_taken_is_an_error() -> None:
    with nothing_left():
        async with running(World("tcp")) as world:
            second = World("tcp")
            second.receiver._port = int(world.receiver.endpoints()[0].address.rpartition(":")[2])
            with pytest.raises(OSError, match="in use"):
                await second.receiver.start()
            await second.sender.close()
            second.source.close()
            second.target.close()
