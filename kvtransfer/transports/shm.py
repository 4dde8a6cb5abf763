"""shm: the receiver maps the sender's pool read-only and copies blocks out of it. For processes of one user on one Linux host.

    sender ── hello + memfd (SCM_RIGHTS) over an abstract Unix socket ──► receiver: verifies fd, maps it PROT_READ
    sender ── part header with its block ids ───────────────────────────► receiver: copies, then sums ITS COPY

The mapping lives as long as the connection: nothing of a sender's epoch is kept behind it. A sender that changes its blocks while
they are copied spoils a copy whose checksum then differs; it cannot touch ours.
"""

import asyncio
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import grpc
import numpy as np

from kvtransfer import framing
from kvtransfer.checksum import extend
from kvtransfer.compatibility import refuse
from kvtransfer.errors import FrameError, PeerClosed, TransferRefused, TransportUnavailable
from kvtransfer.memory import KVMemory, PoolShape, runs, shape_of
from kvtransfer.parts import Part
from kvtransfer.stream import Stream
from protos.v1 import common_pb2, transfer_pb2
from runtime.identity import host_id

if sys.platform == "linux":
    import fcntl

CONNECT_TIMEOUT_S = 1.0
BACKLOG = 128
COPY_BYTES = 256 << 10  # copied, then summed while still in the processor's cache
_NAME_PREFIX = "pdmesh-kv-"
_UCRED = struct.Struct("iII")  # pid, uid, gid


class ShmOutgoing:
    """The sender's end."""

    def __init__(self, stream: Stream, memory: KVMemory) -> None:
        self.stream = stream
        self._memory = memory

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        if self._memory.fd is None:
            raise TransportUnavailable("shm: our pool has no file descriptor to share")
        hello.pool_num_blocks = self._memory.num_blocks
        frame = framing.encode(transfer_pb2.TransferMessage(hello=hello))
        await self.stream.ready(write=True)
        sent = socket.send_fds(self.stream.sock, [frame], [self._memory.fd])
        await self.stream.send_views([memoryview(frame)[sent:]])

    async def send_part(self, header: transfer_pb2.PartHeader, views: Sequence[memoryview], block_ids: Sequence[int]) -> None:
        header.source_block_ids[:] = block_ids
        await self.stream.write_message(transfer_pb2.TransferMessage(part=header))


class ShmIncoming:
    """The receiver's end."""

    def __init__(self, stream: Stream, memory: KVMemory) -> None:
        self.stream = stream
        self._memory = memory
        self._source: MappedPool | None = None

    async def receive_hello(self) -> transfer_pb2.TransferHello:
        beginning, fd = await self._receive_fd()
        try:
            async with asyncio.timeout(self.stream.idle_timeout_s):
                message = await self.stream.read_rest(beginning)
            if message.WhichOneof("message") != "hello":
                raise FrameError(f"expected hello, got {message.WhichOneof('message')}")
            ours = shape_of(self._memory)
            self._source = MappedPool(fd, PoolShape(ours.num_layers, message.hello.pool_num_blocks, ours.bytes_per_layer_block))
            return message.hello
        finally:
            os.close(fd)

    async def receive_part(
        self, header: transfer_pb2.PartHeader, part: Part, block_ids: Sequence[int], on_bytes: Callable[[int], None]
    ) -> int:
        source = self._source
        if source is None:
            raise FrameError("part before hello")
        source_ids = list(header.source_block_ids)
        if len(source_ids) != part.num_blocks:
            raise refuse("part.source_block_ids", f"{len(source_ids)} ids for {part.num_blocks} blocks")
        if max(source_ids) >= source.shape.num_blocks:
            raise refuse("part.source_block_ids", f"{max(source_ids)} is outside the pool of {source.shape.num_blocks} blocks")
        value = await self.stream.run(copy_part, source, source_ids, self._memory, block_ids, part, self.stream.check_interrupted)
        on_bytes(header.num_bytes)
        return value

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    async def _receive_fd(self) -> tuple[bytes, int]:
        """The first bytes of the connection and the one descriptor that must come with them."""
        await self.stream.ready(write=False)
        data, fds, flags, _ = socket.recv_fds(self.stream.sock, framing.HEADER.size, 2, socket.MSG_CMSG_CLOEXEC)
        if data and len(fds) == 1 and not flags & socket.MSG_CTRUNC:
            return data, fds[0]
        for fd in fds:
            os.close(fd)
        if not data:
            raise PeerClosed("the peer closed the connection before its hello")
        raise FrameError(f"shm: a hello must bring exactly one file descriptor, got {len(fds)}")


class MappedPool:
    """A peer's pool, mapped read-only. Raises TransferRefused (UNIMPLEMENTED: use another transport) if that is unsafe."""

    def __init__(self, fd: int, shape: PoolShape) -> None:
        _check_pool(fd, shape)
        self.shape = shape
        try:
            self._map = mmap.mmap(fd, shape.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise _unusable(f"cannot be mapped: {error}") from error

    def view(self) -> memoryview:
        """All bytes; to be released before close()."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap; idempotent."""
        self._map.close()


class ShmTransport:
    """Between processes of one user on one host."""

    name = "shm"

    def sends(self, memory: KVMemory) -> bool:
        return sys.platform == "linux" and memory.fd is not None

    def receives(self) -> bool:
        return sys.platform == "linux"

    def reaches(self, endpoint: common_pb2.TransferEndpoint) -> bool:
        return endpoint.host_id == host_id()

    def listen(self, host: str, port: int) -> socket.socket:
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

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> ShmOutgoing:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(sock, "\0" + endpoint.address)
            check_peer(sock)  # a stranger who took the name must not get our memory
        except (OSError, ValueError) as error:
            sock.close()
            raise TransportUnavailable(f"shm: cannot connect to {endpoint.address}: {error or 'timed out'}") from error
        except BaseException:
            sock.close()
            raise
        return ShmOutgoing(Stream(sock, executor, reply_timeout_s), memory)

    def accept(self, sock: socket.socket, memory: KVMemory, executor: Executor, idle_timeout_s: float) -> ShmIncoming:
        check_peer(sock)
        return ShmIncoming(Stream(sock, executor, idle_timeout_s), memory)


def check_peer(sock: socket.socket) -> None:
    """Raises PermissionError unless the process at the other end belongs to our user."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise PermissionError(f"shm: the peer runs as user {uid}, we as {os.geteuid()}")


def copy_part(
    source: MappedPool,
    source_ids: Sequence[int],
    memory: KVMemory,
    block_ids: Sequence[int],
    part: Part,
    check_interrupted: Callable[[], None],
) -> int:
    """Copy `source_ids` of `source` into `block_ids` of `memory` for the layers of `part`; returns the CRC-32C of the copy.

    Runs in a thread; check_interrupted() may raise between pieces. NumPy releases the GIL while it copies.
    """
    ours, size, value = shape_of(memory), source.shape.bytes_per_layer_block, 0
    pieces = [(source_ids[run.first], block_ids[run.first], run.num_blocks * size) for run in runs(source_ids, block_ids)]
    with source.view() as source_bytes, memory.memory()[:] as our_bytes:
        for layer in part.layers:
            for kv in (0, 1):
                for source_id, block_id, num_bytes in pieces:
                    check_interrupted()
                    begin, end = ours.offset(layer, kv, block_id), source.shape.offset(layer, kv, source_id)
                    value = _copy_run(our_bytes[begin : begin + num_bytes], source_bytes[end : end + num_bytes], value)
    return value


def _copy_run(target: memoryview, source: memoryview, value: int) -> int:
    with target, source:
        for start in range(0, target.nbytes, COPY_BYTES):
            piece = target[start : start + COPY_BYTES]
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(source[start : start + COPY_BYTES], np.uint8))
            value = extend(value, piece)
    return value


def _check_pool(fd: int, shape: PoolShape) -> None:
    """A file that could shrink would turn our copy into SIGBUS; one of another size is not the pool that hello describes."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise _unusable(f"is not a sealable memfd: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise _unusable("is not sealed against shrinking (F_SEAL_SHRINK)")
    if shape.num_bytes == 0 or size != shape.num_bytes:
        raise _unusable(f"has {size} bytes; pool_num_blocks {shape.num_blocks} and the layout make {shape.num_bytes}")


def _unusable(what: str) -> TransferRefused:
    return TransferRefused(grpc.StatusCode.UNIMPLEMENTED, f"the pool's file descriptor {what}", field="hello.pool")
