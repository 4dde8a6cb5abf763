"""shm: the receiver maps the sender's pool read-only and copies blocks out of it, between processes of one user on one host.

    sender ── hello + memfd (SCM_RIGHTS) over an abstract Unix socket ──► receiver: verifies fd, maps it PROT_READ
    sender ── part header with its block ids ───────────────────────────► receiver: copies, sums WHAT IT STORES
    sender ── part end: the sum of what lies in its pool ───────────────► receiver: compares

The mapping may outlive the connection by seconds (KeptPools); a receiver keeps nothing else of that epoch. If a sender
changes its blocks while they are copied, the checksum of the copy differs; it cannot change the receiver's blocks.

It needs memory with seals (Linux). Without them it is not offered, and tcp carries the KV: a file that its sender can shrink
kills a receiver that has mapped it (SIGBUS), and to read it by calls instead (pread) copies through the kernel, as tcp does, from
a file that the system may write to disk.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor

import numpy as np

from kvtransfer import framing
from kvtransfer.errors import FrameError, PeerClosed, TransportUnavailable
from kvtransfer.framing import copy_runs
from kvtransfer.layout import Reach, Scope
from kvtransfer.manifest import KVMemory, Part, Rectangle, copies, shape_of
from kvtransfer.native.library import Runs
from kvtransfer.stream import SocketStream
from kvtransfer.transports.common import MappedPool, MappedPools, UnixSocketTransport, announce, shape_of_sender, source_of
from pdmesh.platform import fallbacks
from pdmesh.platform.capabilities import MEMFD
from pdmesh.v1 import common_pb2, transfer_pb2

BATCH_BYTES = 4 << 20  # copied between two checks whether to stop


class ShmOutgoing:
    """Implement the sender's end of a connection over shm."""

    def __init__(self, stream: SocketStream, memory: KVMemory) -> None:
        self.stream = stream
        self._memory = memory

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        if self._memory.fd is None:
            raise TransportUnavailable("shm: our pool has no file descriptor to share")
        hello.pool_num_blocks = self._memory.num_blocks
        frame = framing.encode(transfer_pb2.TransferMessage(hello=hello))
        await self.stream.ready(write=True)
        sent = socket.send_fds(self.stream.sock, [frame], [self._memory.fd])
        await self.stream.write_bytes(frame[sent:])

    async def send_part(
        self,
        header: transfer_pb2.PartHeader,
        views: Sequence[memoryview],
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        return await announce(self.stream, header, views, block_ids)


class ShmIncoming:
    """Implement the receiver's end of a connection over shm."""

    def __init__(self, stream: SocketStream, memory: KVMemory, pools: MappedPools) -> None:
        self.stream = stream
        self._memory = memory
        self._pools = pools
        self._fd: int | None = None
        self._source: MappedPool | None = None

    async def receive_hello(self) -> transfer_pb2.TransferHello:
        beginning, self._fd = await self._receive_fd()
        async with asyncio.timeout(self.stream.idle_timeout_s):
            message = await self.stream.read_rest(beginning)
        if message.WhichOneof("message") != "hello":
            raise FrameError(f"expected hello, got {message.WhichOneof('message')}")
        return message.hello

    async def prepare(self, hello: transfer_pb2.TransferHello) -> None:
        assert self._fd is not None, "a hello over shm brings a descriptor"
        self._source = self._pools.acquire(self._fd, shape_of_sender(hello, self._memory))

    async def receive_part(
        self,
        header: transfer_pb2.PartHeader,
        part: Part,
        memory: KVMemory,
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        source = self._source
        if source is None:
            raise FrameError("part before hello")
        origin = source_of(header, part, source.shape)
        to = Rectangle(shape_of(memory), part.layers, block_ids)
        value = await self.stream.run(copy_part, source, origin, memory, to, self.stream.check_interrupted)
        on_bytes(header.num_bytes)
        return value

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._source is not None:
            self._pools.release(self._source)
            self._source = None

    async def _receive_fd(self) -> tuple[bytes, int]:
        """Return the first bytes of the connection and the one descriptor that must come with them."""
        await self.stream.ready(write=False)
        data, fds, flags = fallbacks.receive_fds(self.stream.sock, framing.HEADER.size, 2)
        if data and len(fds) == 1 and not flags & socket.MSG_CTRUNC:
            return data, fds[0]
        for fd in fds:
            os.close(fd)
        if not data:
            raise PeerClosed("the peer closed the connection before its hello")
        raise FrameError(f"shm: a hello must bring exactly one file descriptor, got {len(fds)}")


class ShmTransport(UnixSocketTransport):
    """Transfer between processes of one user on one host."""

    name = "shm"
    reach = Reach(Scope.HOST)
    summary = "one copy out of shared memory"
    max_shown_bytes = None

    def __init__(self) -> None:
        self._pools = MappedPools()

    def sends(self, memory: KVMemory) -> bool:
        return self.works_here and memory.fd is not None

    def receives(self, memory: KVMemory) -> bool:
        return self.works_here and MEMFD.is_there

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> ShmOutgoing:
        return ShmOutgoing(await self._connected(endpoint, executor, reply_timeout_s), memory)

    def accept(self, sock: socket.socket, memory: KVMemory, executor: Executor, idle_timeout_s: float) -> ShmIncoming:
        return ShmIncoming(self._accepted(sock, executor, idle_timeout_s), memory, self._pools)

    def close(self) -> None:
        self._pools.close()


def copy_part(
    source: MappedPool, origin: Rectangle, memory: KVMemory, to: Rectangle, check_interrupted: Callable[[], None]
) -> int:
    """Copy `origin` of `source` into `to` of `memory`; return the CRC-32C of the copy.

    It runs in a thread; check_interrupted() may raise between pieces of a few megabytes.
    """
    value = 0
    with source.view() as original, memory.memory() as target:
        for batch in _batches(copies(to, origin)):
            check_interrupted()
            value = copy_runs(value, target, original, batch)
    return value


def _batches(table: Runs) -> Iterator[Runs]:
    """Cut `table` into batches of about BATCH_BYTES; a larger run is a batch of its own."""
    ends = np.cumsum(table[:, 2])
    cuts = np.flatnonzero(np.diff(ends // BATCH_BYTES)) + 1
    yield from np.split(table, cuts)
