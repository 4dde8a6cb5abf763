"""Transfers that go wrong in the middle: over every transport, with real sockets. Nothing wrong is ever committed."""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from torch import Tensor

from kvtransfer import framing
from kvtransfer.errors import FrameError, PeerClosed, PushFailed
from kvtransfer.framing import checksum
from kvtransfer.grpc_stream import MessageStream, Wire
from kvtransfer.manifest import KVMemory, Part, part_views
from kvtransfer.receiver import push as receiver_push
from kvtransfer.sender.sender import PushJob
from kvtransfer.transports.base import Incoming
from kvtransfer.transports.common import InlineIncoming, InlineOutgoing
from kvtransfer.transports.nixl.transport import NixlIncoming
from kvtransfer.transports.registry import GRPC, socket_transports
from kvtransfer.transports.shm import ShmIncoming
from kvtransfer.transports.tcp import TcpTransport
from pdmesh.engine.kv_cache.block_moves import Blocks
from pdmesh.engine.kv_cache.ipc_pool import IndexedSums
from pdmesh.v1 import common_pb2, transfer_pb2
from tests.kvtransfer.endpoints import World, at_part, grpc_server, nothing_left, running, until


def spoil_parts(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The first `times` parts arrive as something else than what was sent."""
    left = iter(range(times))

    def spoiled(receive: Callable[..., Awaitable[int]]) -> Callable[..., Awaitable[int]]:
        async def receive_part(
            incoming: Incoming,
            header: transfer_pb2.PartHeader,
            part: Part,
            memory: KVMemory,
            ids: Sequence[int],
            on_bytes: object,
        ) -> int:
            value = await receive(incoming, header, part, memory, ids, on_bytes)
            if next(left, None) is None:
                return value
            views = part_views(memory, part.layers, ids)
            views[0][7] ^= 0x10
            return checksum(views)

        return receive_part

    for end in (InlineIncoming, ShmIncoming, NixlIncoming):
        monkeypatch.setattr(end, "receive_part", spoiled(end.receive_part))
    copy = IndexedSums.copy

    def copied(copies: IndexedSums, source: Blocks, target: Blocks, sums: Tensor) -> None:
        copy(copies, source, target, sums)
        if next(left, None) is not None:
            target.pool[target.layers.start, 0, target.block_ids[0], 7] ^= 0x10
            sums.zero_()
            copies.sum(target, sums)

    monkeypatch.setattr(IndexedSums, "copy", copied)


async def test_a_corrupt_part_is_sent_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_parts(monkeypatch, 1)
    job = world.job()
    await world.sender.push(job, timeout_s=10)
    world.check_arrived(job)
    assert sum(world.receiver.num_corrupt.values()) == 1


async def test_corrupt_twice_fails_the_attempt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = world.make_sender(part_bytes=1 << 30)  # one part
    spoil_parts(monkeypatch, 2)
    with pytest.raises(PushFailed, match="corrupt twice") as raised:
        await sender.push(world.job(), timeout_s=10)
    assert raised.value.retryable and raised.value.code is grpc.StatusCode.DATA_LOSS
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the attempt fails")
    await sender.close()


async def test_connection_lost_between_parts(world: World) -> None:
    world.job()
    async with world.raw_peer(world.hello("r1")) as peer:
        assert (await peer.send_part(Part(0, 0, 1, 0, 4), [0, 1, 2, 3])).part_reply.ok
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the loss is noticed")


@pytest.mark.parametrize("keep", [0, 3, 8, 30])
async def test_truncated_frames(world: World, keep: int) -> None:
    world.job()
    frame = framing.encode(transfer_pb2.TransferMessage(part=transfer_pb2.PartHeader(num_bytes=1 << 40, block_end=1 << 30)))
    async with world.raw_peer(world.hello("r1")) as peer:
        await peer.send_bytes(frame[:keep])
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the loss is noticed")


@pytest.mark.parametrize("seed", range(8))
async def test_garbage_after_hello_closes_the_connection(world: World, seed: int) -> None:
    world.job()
    garbage = random.Random(seed).randbytes(200)
    async with world.raw_peer(world.hello("r1")) as peer:
        await peer.send_bytes(b"PDKV" * (seed % 2) + garbage)
        with pytest.raises((FrameError, ConnectionError)):
            await peer.stream.read_message()
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the session ends")


@pytest.mark.parametrize(
    "garbage", [b"G", b"GET / HTTP/1.1\r\n\r\n", b"PDKV\xff\xff\xff\xff", b"PDKV\0\0\0\0", b"PDKV\3\0\0\0abc"]
)
async def test_garbage_instead_of_hello(world: World, garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_push, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with world.raw_peer() as peer:
        await peer.send_bytes(garbage)
        with pytest.raises(ConnectionError):
            await peer.stream.read_message()
    await until(lambda: world.receiver.num_connections == 0, "the session ends")
    assert world.delegate.events == []


async def test_a_silent_connection_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_push, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with world.raw_peer() as peer:
        with pytest.raises(PeerClosed):
            await peer.stream.read_message()


@pytest.mark.parametrize("kind", ["hello", "part_reply", "commit_reply", "hello_reply"])
async def test_frames_out_of_place(world: World, kind: str) -> None:
    world.job()
    async with world.raw_peer(world.hello("r1")) as peer:
        message = transfer_pb2.TransferMessage()
        getattr(message, kind).SetInParent()
        await peer.stream.write_message(message)
        with pytest.raises(ConnectionError):
            await peer.stream.read_message()
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the session ends")


async def test_a_sender_that_stalls_is_cut_off(transport: str) -> None:
    with nothing_left():
        async with running(World(transport, idle_timeout_s=0.2)) as world:
            world.job()
            async with world.raw_peer(world.hello("r1")) as peer:
                await peer.send_bytes(b"PDKV")
                await until(lambda: world.delegate.kinds() == ["open", "failed"], "the stalled sender is cut off")
            assert "in time" in world.delegate.events[1][1]


async def test_too_many_sessions(world: World) -> None:
    world.receiver._max_connections = 1
    job = world.job()
    world.job("r2")
    async with world.raw_peer(world.hello("r2")):
        with pytest.raises(PushFailed, match="closed the connection") as raised:
            await world.sender.push(job, timeout_s=10)
        assert raised.value.retryable
    await until(lambda: world.receiver.num_connections == 0, "the session ends")
    await world.sender.push(job, timeout_s=10)


async def test_cancel_in_the_middle(world: World) -> None:
    task = asyncio.create_task(world.sender.push(world.job(), timeout_s=10))
    world.delegate.on_progress = at_part(5, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the receiver notices")


async def test_receiver_stops_in_the_middle(world: World) -> None:
    stopping: list[asyncio.Task[None]] = []
    world.delegate.on_progress = at_part(5, lambda: stopping.append(asyncio.create_task(world.receiver.stop())))
    with pytest.raises(PushFailed) as raised:
        await world.sender.push(world.job(), timeout_s=10)
    await stopping[0]
    assert raised.value.retryable and world.delegate.kinds() == ["open", "failed"]


async def test_sender_closes_in_the_middle(world: World) -> None:
    closing: list[asyncio.Task[None]] = []
    world.delegate.on_progress = at_part(5, lambda: closing.append(asyncio.create_task(world.sender.close())))
    with pytest.raises(PushFailed):
        await world.sender.push(world.job(), timeout_s=10)
    await closing[0]
    with pytest.raises(PushFailed, match="closed"):
        await world.sender.push(world.job("r2"), timeout_s=10)


@asynccontextmanager
async def stuck_receiver(world: World) -> AsyncIterator[tuple[common_pb2.TransferEndpoint, asyncio.Event]]:
    """Says OK to a hello, then neither reads nor answers."""
    greeted = asyncio.Event()

    async def serve(incoming: Incoming) -> None:
        try:
            await incoming.receive_hello()
            await incoming.stream.write_message(transfer_pb2.TransferMessage(hello_reply=transfer_pb2.TransferReply()))
            greeted.set()
            await asyncio.Event().wait()
        finally:
            incoming.close()
            incoming.stream.close()

    with ThreadPoolExecutor(1) as executor:
        if world.transport == "grpc":
            async with grpc_server(StuckService(serve, world, executor), world.tls, world.secret) as address:
                yield GRPC.endpoint(str(address)), greeted
        else:
            async with stuck_listener(serve, world, executor) as endpoint:
                yield endpoint, greeted


@asynccontextmanager
async def stuck_listener(
    serve: Callable[[Incoming], Awaitable[None]], world: World, executor: Executor
) -> AsyncIterator[common_pb2.TransferEndpoint]:
    transport = socket_transports(world.tls, world.secret)[world.transport]
    listener = transport.listen("127.0.0.1", 0)
    listener.setblocking(False)

    async def accept() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        await serve(transport.accept(sock, world.seen_target, executor, 10))

    task = asyncio.create_task(accept())
    try:
        yield transport.endpoint(listener, None)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()
        transport.close()


@dataclass
class StuckService:
    serve: Callable[[Incoming], Awaitable[None]]
    world: World
    executor: Executor

    async def serve_push(self, wire: Wire) -> None:
        stream = MessageStream(wire, self.executor, 10)
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.carry())
            await self.serve(GRPC.accept(stream, self.world.target))


@pytest.fixture
async def big_world(transport: str) -> AsyncIterator[World]:
    """KV that no socket buffer holds: 12 MB in one part."""
    with nothing_left():
        async with running(World(transport, num_layers=40, num_blocks=300, part_bytes=1 << 24)) as world:
            yield world


def stuck_job(world: World, endpoint: common_pb2.TransferEndpoint) -> PushJob:
    job = world.job(num_blocks=300)
    del job.reservation.endpoints[:]
    job.reservation.endpoints.append(endpoint)
    return job


async def test_a_receiver_that_does_not_answer(big_world: World) -> None:
    sender = big_world.make_sender(part_bytes=1 << 24, reply_timeout_s=0.2)
    async with stuck_receiver(big_world) as (endpoint, _):
        with pytest.raises(PushFailed) as raised:
            await sender.push(stuck_job(big_world, endpoint), timeout_s=10)
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED and raised.value.retryable
    await sender.close()


async def test_the_timeout_of_a_push(big_world: World) -> None:
    async with stuck_receiver(big_world) as (endpoint, _):
        with pytest.raises(PushFailed) as raised:
            await big_world.sender.push(stuck_job(big_world, endpoint), timeout_s=0.2)
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_cancel_while_the_receiver_does_not_read(big_world: World) -> None:
    async with stuck_receiver(big_world) as (endpoint, greeted):
        task = asyncio.create_task(big_world.sender.push(stuck_job(big_world, endpoint), timeout_s=60))
        await greeted.wait()
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 2


async def test_a_grant_outside_the_pool_is_not_written(world: World) -> None:
    job = world.job()
    world.delegate.held["r1"].block_ids = tuple(range(60, 80))
    with pytest.raises(PushFailed, match="outside the pool") as raised:
        await world.sender.push(job, timeout_s=10)
    assert raised.value.code is grpc.StatusCode.INTERNAL
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "it is reported")


async def test_an_error_of_the_delegate_closes_and_reports(world: World) -> None:
    def fail(target: object) -> None:
        raise RuntimeError("a bug of decode_service")

    world.delegate.on_commit = fail
    with pytest.raises(PushFailed) as raised:
        await world.sender.push(world.job(), timeout_s=10)
    assert raised.value.retryable
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "it is reported")


async def test_a_receiver_that_stops_in_the_turn_of_an_accept_leaves_nothing() -> None:
    """The connection's task is cancelled before its first step."""
    with nothing_left():
        async with running(World("tcp")) as world:
            ours, theirs = socket.socketpair()
            tcp = next(transport for transport in world.receiver._transports if transport.name == "tcp")
            world.receiver._begin(tcp, theirs)
            await world.receiver.stop()
            assert ours.recv(1) == b""
            ours.close()


async def test_a_sender_that_closes_while_it_connects_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        async with running(World("tcp")) as world:
            connecting, go = asyncio.Event(), asyncio.Event()
            connect = TcpTransport.connect

            async def slow(*args: Any) -> InlineOutgoing:
                connecting.set()
                await go.wait()
                return await connect(*args)

            monkeypatch.setattr(TcpTransport, "connect", slow)
            push = asyncio.create_task(world.sender.push(world.job(), timeout_s=10))
            await connecting.wait()
            closing = asyncio.create_task(world.sender.close())
            await asyncio.sleep(0)
            assert not closing.done()
            go.set()
            await closing
            with pytest.raises(PushFailed, match="closed"):
                await push
