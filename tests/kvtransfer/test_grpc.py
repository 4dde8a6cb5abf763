"""What is particular to grpc: it steps in where only the gRPC port is open, in bounded memory, as its .proto says."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress

import grpc.aio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtransfer import framing
from kvtransfer.errors import FrameError, PeerClosed
from kvtransfer.grpc_stream import MAX_IN_INBOX, MAX_IN_OUTBOX, Mailbox, MessageStream, Wire, unwrap, wrap
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender import sender
from kvtransfer.sender.sender import Silent
from kvtransfer.stream import MAX_PIECE_BYTES
from kvtransfer.transports import tcp
from kvtransfer.transports.grpc import METHOD, SERVICE
from kvtransfer.transports.registry import GRPC
from pdmesh.runtime.rpc.channel import MAX_MESSAGE_BYTES
from pdmesh.v1 import common_pb2, transfer_pb2
from tests.kvtransfer.endpoints import EPOCH, World, grpc_server, nothing_left, running, until

MIB = 1 << 20


@given(st.lists(st.binary(max_size=300)))
@example([bytes(MIB)])
@example([bytes(127), b"x"])
def test_chunks_are_what_protobuf_makes_of_them(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    message = wrap(pieces)
    assert transfer_pb2.TransferChunk.FromString(message).data == data
    assert unwrap(message) == data
    if data:
        assert transfer_pb2.TransferChunk(data=data).SerializeToString() == message


@given(st.binary(min_size=1, max_size=20))
@example(b"\x0a")
@example(b"\x0a\xff\xff\xff\xff\xff\xff")
@example(b"\x0a\x05abc")
def test_any_message_is_a_chunk_or_an_error(message: bytes) -> None:
    try:
        data = unwrap(message)
    except FrameError:
        return
    assert transfer_pb2.TransferChunk.FromString(message).data == data


def test_the_largest_message_is_far_below_what_servers_take() -> None:
    largest = wrap([bytes(max(framing.HEADER.size + framing.MAX_FRAME_BYTES, MAX_PIECE_BYTES))])
    assert 4 * len(largest) < MAX_MESSAGE_BYTES


async def test_a_mailbox_makes_the_writer_wait_and_the_end_wakes_both() -> None:
    box = Mailbox(2)
    for message in (b"1", b"2"):
        await box.put(message)
    third = asyncio.create_task(box.put(b"3"))
    await asyncio.sleep(0)
    assert not third.done() and await box.get() == b"1"
    await third
    box.end(PeerClosed("over"))
    assert [await box.get(), await box.get()] == [b"2", b"3"]
    for wait in (box.get(), box.put(b"4")):
        with pytest.raises(PeerClosed, match="over"):
            await wait


@pytest.fixture
async def both_worlds() -> AsyncIterator[World]:
    """Decode offers tcp and grpc."""
    with nothing_left():
        world = World("tcp")
        world.receiver = Receiver(world.target, world.delegate, world.identity, world.layout, transports=("tcp", "grpc"))
        async with running(world):
            yield world


async def test_tcp_is_preferred(both_worlds: World) -> None:
    job = both_worlds.job()
    assert [endpoint.transport for endpoint in job.reservation.endpoints] == ["tcp", "grpc"]
    assert (await both_worlds.sender.push(job, timeout_s=10)).transport == "tcp"


async def test_a_closed_tcp_port_goes_over_grpc(both_worlds: World) -> None:
    job = both_worlds.job()
    job.reservation.endpoints[0].address = "127.0.0.1:1"
    assert (await both_worlds.sender.push(job, timeout_s=10)).transport == "grpc"
    both_worlds.check_arrived(job)
    assert both_worlds.delegate.kinds() == ["open", "commit"]


@contextmanager
def black_hole() -> Iterator[str]:
    """A port that swallows packets: its backlog is full and nobody accepts."""
    with socket.socket() as listener, socket.socket() as filler:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        filler.connect(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_only_the_first_push_waits_for_a_port_that_swallows_packets(
    both_worlds: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 0.3)
    took = []
    with black_hole() as address:
        for name in ("r1", "r2"):
            job = both_worlds.job(name)
            job.reservation.endpoints[0].address = address
            started = time.monotonic()
            assert (await both_worlds.sender.push(job, timeout_s=10)).transport == "grpc"
            took.append(time.monotonic() - started)
    assert took[0] >= 0.3 > took[1]


async def test_a_silent_endpoint_is_asked_again_after_a_while_or_for_want_of_another(both_worlds: World) -> None:
    job = both_worlds.job()
    closed, answering = job.reservation.endpoints
    both_worlds.sender._silent.note(closed, EPOCH)
    both_worlds.sender._silent.note(answering, EPOCH)
    assert (await both_worlds.sender.push(job, timeout_s=10)).transport == "tcp"
    brief = Silent(0.0)
    brief.note(closed, EPOCH)
    assert not brief.holds(closed, EPOCH)


async def test_a_server_without_the_service_or_a_receiver_that_stopped(both_worlds: World) -> None:
    job = both_worlds.job()
    await both_worlds.receiver.stop()
    with pytest.raises(sender.PushFailed, match="grpc: the receiver closed the connection at hello") as raised:
        await both_worlds.sender.push(job, timeout_s=10)
    assert raised.value.retryable


async def test_nobody_at_the_port() -> None:
    with nothing_left():
        async with running(World("grpc")) as world:
            job = world.job()
            job.reservation.endpoints[0].address = "127.0.0.1:1"
            with pytest.raises(sender.PushFailed, match=r"grpc: cannot connect to 127\.0\.0\.1:1"):
                await world.sender.push(job, timeout_s=10)


async def test_several_calls_share_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "BYTES_FOR_A_CONNECTION", 1 << 10)
    with nothing_left():
        world = World("grpc", part_bytes=2048)
        world.sender = world.make_sender(part_bytes=2048, num_connections=3)
        async with running(world):
            job = world.job()
            push = asyncio.create_task(world.sender.push(job, timeout_s=10))
            await until(lambda: world.receiver.num_connections == 3, "three calls")
            await push
            world.check_arrived(job)


class Deaf:
    """Takes calls and never reads from them; counts what its stream has taken in all the same."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.num_bytes = 0

    async def serve_push(self, wire: Wire) -> None:
        await MessageStream(_Counting(wire, self), self.executor, 10).carry()


class _Counting:
    def __init__(self, wire: Wire, deaf: Deaf) -> None:
        self._wire, self._deaf = wire, deaf

    async def read(self) -> object:
        message = await self._wire.read()
        self._deaf.num_bytes += len(message) if isinstance(message, bytes) else 0
        return message

    async def write(self, request: bytes, /) -> None:
        await self._wire.write(request)


@asynccontextmanager
async def to_deaf_ears(deaf: Deaf, reply_timeout_s: float) -> AsyncIterator[MessageStream]:
    async with grpc_server(deaf) as address:
        with ThreadPoolExecutor(1) as executor:
            endpoint = common_pb2.TransferEndpoint(transport="grpc", address=str(address))
            world = World("grpc")
            outgoing = await GRPC.connect(endpoint, world.source, executor, reply_timeout_s)
            assert isinstance(outgoing.stream, MessageStream)
            try:
                yield outgoing.stream
            finally:
                outgoing.stream.close()
                await outgoing.stream.wait_closed()
                await world.sender.close()
                world.source.close()
                world.target.close()
    deaf.executor.shutdown()


async def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    """Of 64 MiB a few are on their way, at both ends and between them together."""
    with nothing_left():
        deaf = Deaf()
        async with to_deaf_ears(deaf, 0.5) as stream:
            data, num_sent = memoryview(bytes(MIB)), 0
            with pytest.raises(TimeoutError):
                for _ in range(64):
                    await stream.send_views([data], lambda _count: None)
                    num_sent += MIB
        assert num_sent <= 8 * MIB
        assert deaf.num_bytes <= (MAX_IN_INBOX + 1) * (MIB + 16)
        assert MAX_IN_INBOX + MAX_IN_OUTBOX <= 4


async def test_a_sender_that_vanishes_wakes_its_reader() -> None:
    with nothing_left():
        deaf = Deaf()
        async with to_deaf_ears(deaf, 5) as stream:
            reading = asyncio.create_task(stream.read_message())
            await asyncio.sleep(0.05)
            stream.interrupt()
            with pytest.raises(PeerClosed, match="interrupted"):
                await reading


async def test_messages_that_are_no_chunks_end_the_call() -> None:
    with nothing_left():
        async with running(World("grpc")) as world:
            world.job()
            address = world.receiver.endpoints()[0].address
            async with grpc.aio.insecure_channel(address) as channel:
                push: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")
                call = push()
                with suppress(grpc.aio.AioRpcError):
                    await call.write(b"GET / HTTP/1.1")
                    assert await call.read() in (b"", grpc.aio.EOF)
            await until(lambda: world.receiver.num_connections == 0, "the call ends")
            assert world.delegate.events == []


def test_the_endpoint_is_the_servers_address() -> None:
    assert GRPC.endpoint("10.0.0.1:80") == common_pb2.TransferEndpoint(transport="grpc", address="10.0.0.1:80")
