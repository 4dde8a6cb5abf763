"""The code that transports share: parts inline on a stream, parts that the receiver reads, sums on devices, and Unix sockets."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import grpc

from kvtransfer.errors import FrameError, PeerClosed, TransferRefused, TransportUnavailable, push_failed
from kvtransfer.framing import checksum
from kvtransfer.layout import num_planes
from kvtransfer.manifest import KVMemory, Part, PoolShape, Rectangle, bytes_per_layer_block, part_views, refuse
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import SocketStream, Stream, all_ended, expect, release
from pdmesh.platform import linux
from pdmesh.platform.capabilities import ABSTRACT_SOCKETS, PEER_CREDENTIALS
from pdmesh.runtime import failpoints
from pdmesh.runtime.process import host_id
from pdmesh.v1 import common_pb2, transfer_pb2

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.ipc_pool import PeerPool, ShownPool
    from pdmesh.engine.kv_cache.streams import Mark


HANDSHAKE_TIMEOUT_S = 2.0


class InlineOutgoing:
    """Send parts whose bytes follow their header, out of pool memory."""

    def __init__(self, stream: Stream, name: str) -> None:
        """Create the sender's end. `name`: transport and address, for messages."""
        self.stream = stream
        self._name = name

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        """Send hello. Raises TransportUnavailable when the connection cannot be opened."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self.stream.open()
        except (PeerClosed, TimeoutError) as error:
            raise TransportUnavailable(f"{self._name}: {str(error) or 'no handshake in time'}") from error
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
    """Receive parts whose bytes follow their header, into pool memory."""

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
        """Do nothing: the connection holds only the stream."""


# For transports over which the receiver reads a part: the header names the part's blocks in the sender's pool


def shape_of_sender(hello: transfer_pb2.TransferHello, memory: KVMemory) -> PoolShape:
    """Return the shape of the pool that `hello` describes; `memory` is ours, of the same model."""
    size = bytes_per_layer_block(hello.identity, hello.layout)
    return PoolShape(memory.num_layers, hello.pool_num_blocks, size, num_planes(hello.layout.arrangement))


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


# For transports that copy a part from one device's pool to another's: each end sums the bytes in its own pool (word_sum)


ALIVE_S = 0.5  # between two keepalives while the device computes

logger = logging.getLogger(__name__)


class SummedOutgoing:
    """Announce a part that the receiver's device reads, with its sum, once our device has computed both. Subclasses send
    hello."""

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
    """Receive parts only by reads of the device."""

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
    """Return the sum of what our device stores. A caller that is cancelled returns when the device has finished. Raises
    TransferRefused."""
    try:
        pulling = pull()
        await all_ended([pulling])
        return pulling.result()
    except (RuntimeError, ValueError) as error:
        logger.warning("the device could not read a part of another worker's pool: %s", error)
        raise unusable("part", f"the device could not read it: {error}") from error


def shown_by(memory: KVMemory) -> ShownPool | None:
    """Return the pool that other processes may read; None: they may not."""
    return memory.shown if isinstance(memory, StagedMemory) else None


def unusable(field: str, what: str) -> TransferRefused:
    """Return a refusal that makes the sender take another transport."""
    return TransferRefused(grpc.StatusCode.UNIMPLEMENTED, what, field=field)


# Transports over abstract Unix sockets, between processes of one user on one host: the kernel identifies the peer. Without either
# they are not offered, and KV goes over tcp: a socket that is a file would have to be kept from others by permissions alone.


CONNECT_TIMEOUT_S = 1.0
BACKLOG = 128
_NAME_PREFIX = "pdmesh-kv-"


class UnixSocketTransport:
    """Implement what the transports over abstract Unix sockets share."""

    name: str
    is_default = True
    gains_by_connections = False  # KV does not cross the connection, so a second one only costs a handshake

    @property
    def works_here(self) -> bool:
        """Return whether this system has such sockets and identifies the process at their other end."""
        return ABSTRACT_SOCKETS.is_there and PEER_CREDENTIALS.is_there

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
    uid = linux.peer_uid(sock)
    if uid != os.geteuid():
        raise PermissionError(f"{transport}: the peer runs as user {uid}, we as {os.geteuid()}")


# Cache of peers' pools that this process has opened; they are kept for a while after their last use.


KEEP_S = 5.0  # how long an unused pool is kept for the next push of its sender


class Closable(Protocol):
    def close(self) -> None: ...


Key = TypeVar("Key")
Pool = TypeVar("Pool", bound=Closable)


@dataclass
class _Kept(Generic[Pool]):
    pool: Pool
    num_users: int = 0
    expiry: asyncio.TimerHandle | None = None


class KeptPools(Generic[Key, Pool]):
    """Keep each peer's pool open over all pushes that come out of it. A pool is closed KEEP_S after its last use: it would keep
    the memory of a peer that has died. It is used on the event loop only."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept[Pool]] = {}

    def __len__(self) -> int:
        """Return the number of open pools."""
        return len(self._kept)

    def find(self, key: Key) -> Pool | None:
        """Return the pool of `key`, if it is open; call `use` in the same turn of the event loop."""
        kept = self._kept.get(key)
        return None if kept is None else kept.pool

    def use(self, key: Key, pool: Pool) -> Pool:
        """Return `pool`, kept open for `key` until release(). It is the result of `find`, or was just opened and belongs to the
        cache from now on."""
        kept = self._kept.setdefault(key, _Kept(pool))
        assert kept.pool is pool, "there is one opening for each key"
        if kept.expiry is not None:
            kept.expiry.cancel()
            kept.expiry = None
        kept.num_users += 1
        return pool

    def release(self, pool: Pool) -> None:
        """End one use(): this caller does not read the pool any more."""
        key, kept = next((key, kept) for key, kept in self._kept.items() if kept.pool is pool)
        kept.num_users -= 1
        if kept.num_users == 0 and not KEEP_S:
            self._expire(key)
        elif kept.num_users == 0:
            kept.expiry = asyncio.get_running_loop().call_later(KEEP_S, self._expire, key)

    def close(self) -> None:
        """Close the pools that are not in use; idempotent."""
        for key in [key for key, kept in self._kept.items() if kept.num_users == 0]:
            self._expire(key)

    def _expire(self, key: Key) -> None:
        kept = self._kept.pop(key)
        if kept.expiry is not None:
            kept.expiry.cancel()
        kept.pool.close()


# Peers' pools that are mapped read-only into this process


MappedKey = tuple[int, int, PoolShape]


class MappedPool:
    """Map a peer's pool read-only. Raises TransferRefused (UNIMPLEMENTED: use another transport) if that is unsafe."""

    def __init__(self, fd: int, shape: PoolShape) -> None:
        _check_pool(fd, shape)
        self.shape = shape
        try:
            failpoints.hit("shm.map")
            self._map = mmap.mmap(fd, shape.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise _unusable(f"cannot be mapped: {error}") from error

    def view(self) -> memoryview:
        """Return all bytes of the pool; the caller releases the view before close()."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap the pool; idempotent."""
        self._map.close()


class MappedPools(KeptPools[MappedKey, MappedPool]):
    """Cache mappings, because touching every page of a fresh mapping costs a third of the copying."""

    def acquire(self, fd: int, shape: PoolShape) -> MappedPool:
        """Return the pool behind `fd`, open until release(). Raises TransferRefused as MappedPool does."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, shape)  # while it is mapped, no other file can have its number
        pool = self.find(key)
        if pool is not None:
            _check_pool(fd, shape)
        return self.use(key, pool or MappedPool(fd, shape))


def _check_pool(fd: int, shape: PoolShape) -> None:
    """Check the file: our copy would raise SIGBUS if the file could shrink, and a file of another size is not the pool of the
    hello."""
    try:
        is_sealed = linux.cannot_shrink(fd)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise _unusable(f"is not a sealable memfd: {error}") from error
    if not is_sealed:
        raise _unusable("is not sealed against shrinking (F_SEAL_SHRINK)")
    if shape.num_bytes == 0 or size != shape.num_bytes:
        raise _unusable(f"has {size} bytes; pool_num_blocks {shape.num_blocks} and the layout make {shape.num_bytes}")


def _unusable(what: str) -> TransferRefused:
    return TransferRefused(grpc.StatusCode.UNIMPLEMENTED, f"the pool's file descriptor {what}", field="hello.pool")


# Peers' pools on devices of this host that are open in this process


OpenedKey = tuple[object, ...]


class OpenedPools(KeptPools[OpenedKey, "PeerPool"]):
    """Cache opened pools, because opening one may take the driver milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._opening = asyncio.Lock()

    async def acquire(self, key: OpenedKey, open_pool: Callable[[], Awaitable[PeerPool]]) -> PeerPool:
        """Return the pool of `key`, open until release(); open it if need be. Raises the errors of `open_pool`."""
        async with self._opening:
            return self.use(key, self.find(key) or await open_pool())
