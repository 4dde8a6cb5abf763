"""What transports share: parts inline on a stream, parts that the receiver reads, sums on devices, and Unix sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

import grpc

from kvtransfer.errors import FrameError, PeerClosed, TransferRefused, TransportUnavailable, push_failed
from kvtransfer.framing import checksum
from kvtransfer.manifest import KVMemory, Part, PoolShape, Rectangle, bytes_per_layer_block, part_views, refuse
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import SocketStream, Stream, all_ended, expect, release
from pdmesh.runtime.process import host_id
from pdmesh.v1 import common_pb2, transfer_pb2

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.ipc_pool import ShownPool
    from pdmesh.engine.kv_cache.streams import Mark


HANDSHAKE_TIMEOUT_S = 2.0


class InlineOutgoing:
    """The sender's end of a connection on which the bytes of a part follow its header, out of pool memory."""

    def __init__(self, stream: Stream, name: str) -> None:
        """`name` of transport and address, for messages."""
        self.stream = stream
        self._name = name

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        """Send hello. Raises TransportUnavailable when the connection cannot be opened."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self.stream.open()
        except (PeerClosed, TimeoutError) as error:
            raise TransportUnavailable(f"{self._name}: {str(error) or 'no TLS handshake in time'}") from error
        await self.stream.write_message(transfer_pb2.TransferMessage(hello=hello))

    async def send_part(
        self,
        header: transfer_pb2.PartHeader,
        views: Sequence[memoryview],
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        await self.stream.write_message(transfer_pb2.TransferMessage(part=header))
        return await self.stream.send_views(views, on_bytes)


class InlineIncoming:
    """The receiver's end of a connection on which the bytes of a part follow its header, into pool memory."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def receive_hello(self) -> transfer_pb2.TransferHello:
        await self.stream.open()
        return (await expect(self.stream, "hello")).hello

    async def prepare(self, hello: transfer_pb2.TransferHello) -> None:
        """Do nothing: the sender writes the bytes."""

    async def receive_part(
        self,
        header: transfer_pb2.PartHeader,
        part: Part,
        memory: KVMemory,
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        views = part_views(memory, part.layers, block_ids)
        try:
            return await self.stream.receive_views(views, on_bytes)
        finally:
            release(views)

    def close(self) -> None:
        """Do nothing: only the stream is held."""


# For transports over which the receiver reads a part: the header says where it lies in the sender's pool


def shape_of_sender(hello: transfer_pb2.TransferHello, memory: KVMemory) -> PoolShape:
    """Return the shape of the pool that `hello` describes; `memory` is ours, of the same model."""
    return PoolShape(memory.num_layers, hello.pool_num_blocks, bytes_per_layer_block(hello.identity, hello.layout))


async def announce(stream: Stream, header: transfer_pb2.PartHeader, views: Sequence[memoryview], block_ids: Sequence[int]) -> int:
    """Announce where the part lies, and sum its bytes while the receiver reads them; return their CRC-32C."""
    header.source_block_ids[:] = block_ids
    await stream.write_message(transfer_pb2.TransferMessage(part=header))
    return await stream.run(checksum, views)


def source_of(header: transfer_pb2.PartHeader, part: Part, shape: PoolShape) -> Rectangle:
    """Return where the bytes of `part` lie in the sender's pool. Raises TransferRefused naming the field that points outside
    it."""
    source_ids = list(header.source_block_ids)
    if len(source_ids) != part.num_blocks:
        raise refuse("part.source_block_ids", f"{len(source_ids)} ids for {part.num_blocks} blocks")
    if max(source_ids) >= shape.num_blocks:
        raise refuse("part.source_block_ids", f"{max(source_ids)} is outside the pool of {shape.num_blocks} blocks")
    return Rectangle(shape, range(header.layer_start, header.layer_start + len(part.layers)), source_ids)


# For transports over which a part goes from the pool of one device to that of another: each end sums its own (word_sum)


ALIVE_S = 0.5  # between two keepalives while the device computes

logger = logging.getLogger(__name__)


class SummedOutgoing:
    """The sender's end except for its hello. A part is announced with its sum when the device has computed both."""

    def __init__(self, stream: Stream, shown: ShownPool, transport: str) -> None:
        self.stream = stream
        self._shown = shown
        self._transport = transport
        self._sum = 0

    async def settle(
        self, layers: range, block_ids: Sequence[int], after: Mark, say_alive: Callable[[], Awaitable[None]]
    ) -> None:
        summing = self._shown.sum(layers, block_ids, after)
        waiting = asyncio.wrap_future(summing)
        try:
            while not (await asyncio.wait([waiting], timeout=ALIVE_S))[0]:
                await say_alive()
        finally:
            await all_ended([summing])
        if (error := waiting.exception()) is not None:
            problem = f"{self._transport}: our device could not sum a part: {error}"
            raise push_failed(grpc.StatusCode.UNIMPLEMENTED, problem) from error
        self._sum = waiting.result()

    async def send_part(
        self,
        header: transfer_pb2.PartHeader,
        views: Sequence[memoryview],
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        header.source_block_ids[:] = block_ids
        await self.stream.write_message(transfer_pb2.TransferMessage(part=header))
        return self._sum


class SummedIncoming:
    """The receiver's end where parts come only by a read of the device."""

    async def receive_part(
        self,
        header: transfer_pb2.PartHeader,
        part: Part,
        memory: KVMemory,
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        raise FrameError("over this transport parts are pulled into the pool of a device, and nowhere else")


async def pulled(pull: Callable[[], Future[int]]) -> int:
    """Return the sum of what our device stores; a cancelled caller returns when the device has finished. Raises
    TransferRefused."""
    try:
        pulling = pull()
        await all_ended([pulling])
        return pulling.result()
    except (RuntimeError, ValueError) as error:
        logger.warning("the device could not read a part of another worker's pool: %s", error)
        raise unusable("part", f"the device could not read it: {error}") from error


def shown_by(memory: KVMemory) -> ShownPool | None:
    """Return the pool as other processes may read it; None: they may not."""
    return memory.shown if isinstance(memory, StagedMemory) else None


def unusable(field: str, what: str) -> TransferRefused:
    """Return the refusal on which the sender takes another transport."""
    return TransferRefused(grpc.StatusCode.UNIMPLEMENTED, what, field=field)


# Transports over abstract Unix sockets, between processes of one user on one host: the kernel identifies the peer.


CONNECT_TIMEOUT_S = 1.0
BACKLOG = 128
_NAME_PREFIX = "pdmesh-kv-"
_UCRED = struct.Struct("iII")  # pid, uid, gid


class UnixSocketTransport:
    """Common part of the transports over abstract Unix sockets."""

    name: str
    is_default = True
    gains_by_connections = False  # one costs the memory nothing, and a second one a handshake

    def reaches(self, endpoint: common_pb2.TransferEndpoint) -> bool:
        return endpoint.host_id == host_id()

    def listen(self, host: str, port: int) -> socket.socket:
        """Return a listening socket with a name of its own."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + _NAME_PREFIX + secrets.token_hex(16))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def endpoint(self, listener: socket.socket, advertise: str | None) -> common_pb2.TransferEndpoint:
        name: bytes = listener.getsockname()
        return common_pb2.TransferEndpoint(transport=self.name, address=name[1:].decode("ascii"), host_id=host_id())

    async def _connected(self, endpoint: common_pb2.TransferEndpoint, executor: Executor, reply_timeout_s: float) -> SocketStream:
        """Connect to a process of our user. Raises TransportUnavailable."""
        return SocketStream(await _connected(self.name, endpoint.address), executor, reply_timeout_s)

    def _accepted(self, sock: socket.socket, executor: Executor, idle_timeout_s: float) -> SocketStream:
        """Take over `sock`. Raises PermissionError unless the process at the other end belongs to our user."""
        _check_peer(self.name, sock)
        return SocketStream(sock, executor, idle_timeout_s)


async def _connected(transport: str, name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, "\0" + name)
        _check_peer(transport, sock)  # another user's process with this name must not get our memory
    except (OSError, ValueError) as error:
        sock.close()
        raise TransportUnavailable(f"{transport}: cannot connect to {name}: {error or 'timed out'}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _check_peer(transport: str, sock: socket.socket) -> None:
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise PermissionError(f"{transport}: the peer runs as user {uid}, we as {os.geteuid()}")
