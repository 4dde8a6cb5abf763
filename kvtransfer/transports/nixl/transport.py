"""nixl: the receiver has NIXL read the sender's pool, by RDMA where both hosts have it. Optional: the package may be missing.

    sender ── hello + metadata of its agent, address of its pool, over tcp ──► receiver: connects its agent to that one
    sender ── part header with its block ids ────────────────────────────────► receiver: NIXL_READs into buffers of its own,
                                                                                copies them, sums WHAT IT STORES
    sender ── part end: the sum of what lies in its pool ────────────────────► receiver: compares

The receiver reads, and no other process writes into its pool: neither a sender that was paused and resumes after its blocks were
freed, nor NIXL, which goes on writing after a read was released (reader.py). The price is a copy, during which the checksum is
computed that would read the bytes anyhow. device.py is for pools in GPU memory. KV between a pool in GPU memory and one in host
memory goes over tcp.

With TLS only the control connection is encrypted. The KV itself is transferred by NIXL unencrypted, and a host that reaches a
sender's agent and knows its metadata can read its pool: use it only on a trusted network.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, TypeVar

from kvtransfer.errors import FrameError, TransportUnavailable
from kvtransfer.manifest import KVMemory, Part, PoolShape, Rectangle, shape_of
from kvtransfer.native.library import address_of
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import SocketStream
from kvtransfer.transports.common import InlineIncoming, InlineOutgoing, announce, shown_by, source_of, unusable
from kvtransfer.transports.nixl.agent import HOST, Agent, NixlUnusable, is_installed
from kvtransfer.transports.nixl.device import (
    ROOM_BYTES,
    DeviceReader,
    NixlDeviceIncoming,
    NixlDeviceOutgoing,
    check_pool,
    place_of,
)
from kvtransfer.transports.nixl.reader import Pull, Reader, Remote
from kvtransfer.transports.tcp import TcpTransport
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import common_pb2, transfer_pb2

if TYPE_CHECKING:  # transfers of KV in CPU memory need no torch
    from pdmesh.engine.kv_cache.ipc_pool import ShownPool

OPEN_TIMEOUT_S = 2.0  # includes loading the package the first time; a lease must not lapse meanwhile
POLL_S = 0.005  # no thread waits while nothing arrives

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NixlOutgoing(InlineOutgoing):
    """Implement the sender's end of a connection over nixl."""

    def __init__(self, inline: InlineOutgoing, name: str, agent: Agent, memory: KVMemory) -> None:
        super().__init__(inline.stream, name)
        self._agent = agent
        self._memory = memory

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        hello.nixl_metadata = self._agent.metadata
        hello.pool_address = _address(self._memory)
        hello.pool_num_blocks = self._memory.num_blocks
        await super().send_hello(hello)

    async def send_part(
        self,
        header: transfer_pb2.PartHeader,
        views: Sequence[memoryview],
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        return await announce(self.stream, header, views, block_ids)


class NixlIncoming(InlineIncoming):
    """Implement the receiver's end of a connection over nixl."""

    def __init__(self, stream: SocketStream, memory: KVMemory, reader: Callable[[], Reader]) -> None:
        super().__init__(stream)
        self._memory = memory
        self._open_reader = reader
        self._metadata = b""
        self._address = 0
        self._shape: PoolShape | None = None
        self._reader: Reader | None = None
        self._remote: Remote | None = None

    async def prepare(self, hello: transfer_pb2.TransferHello) -> None:
        """Check the hello. NIXL parses the metadata at the first part, because only then the delegate has checked the hello's
        token."""
        if hello.HasField("nixl_device"):
            raise unusable("hello.nixl_device", "the sender's pool is in memory of a device, ours is not")
        shape = check_pool(hello, self._memory)
        self._metadata, self._address, self._shape = hello.nixl_metadata, hello.pool_address, shape

    async def receive_part(
        self,
        header: transfer_pb2.PartHeader,
        part: Part,
        memory: KVMemory,
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        if self._shape is None:
            raise FrameError("part before hello")
        source = source_of(header, part, self._shape)
        if self._remote is None:
            await self.stream.run(self._reach)
        assert self._reader is not None and self._remote is not None, "the sender's agent is reached"
        target = Rectangle(shape_of(memory), part.layers, block_ids)
        pull = Pull(self._reader, self._remote, self._address, source, memory, target)
        try:
            await self._receive(pull, on_bytes)
        finally:
            pull.close()
        return pull.value

    def close(self) -> None:
        if self._reader is not None and self._remote is not None:
            self._reader.leave(self._remote)
        self._remote = None

    def _reach(self) -> None:
        self._reader = self._open_reader()
        self._remote = self._reader.reach(self._metadata)

    async def _receive(self, pull: Pull, on_bytes: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        last_news = loop.time()
        while pull.remaining:
            num_bytes = await self.stream.run(pull.turn, self.stream.check_interrupted)
            if num_bytes:
                on_bytes(num_bytes)
                last_news = loop.time()
            elif loop.time() - last_news > self.stream.idle_timeout_s:
                raise TimeoutError
            else:
                await asyncio.sleep(POLL_S)


class NixlTransport(TcpTransport):
    """Transfer between any two hosts whose processes have the package."""

    name = "nixl"
    summary = "RDMA, where the hosts have it"
    is_default = False  # it needs a package, and a network that is set up for it
    gains_by_connections = False
    max_shown_bytes = ROOM_BYTES

    def __init__(self, tls: Tls | None = None, secret: MeshSecret | None = None) -> None:
        super().__init__(tls, secret)
        self._opening = threading.Lock()
        self._agents: dict[tuple[int, int], Agent] = {}  # the sender's agents, by address and size of the pool
        self._reader: Reader | None = None
        self._device_reader: DeviceReader | None = None
        self._problem: str | None = None

    def sends(self, memory: KVMemory) -> bool:
        return self._problem is None and is_installed() and _is_seen(memory)

    def receives(self, memory: KVMemory) -> bool:
        """Return whether memory of this kind can be written. It opens the agent, so that the worker logs errors at its start and
        goes on without nixl."""
        if not _is_seen(memory):
            return False
        try:
            if (shown := shown_by(memory)) is None:
                self._open_reader()
            else:
                self._open_device_reader(shown)
        except NixlUnusable:
            return False
        return True

    def listen(self, host: str, port: int) -> socket.socket:
        """Return a listening socket on any free port, like NIXL's own; `port` is for tcp."""
        return super().listen(host, 0)

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> NixlOutgoing | NixlDeviceOutgoing:
        opening = asyncio.get_running_loop().run_in_executor(executor, self._agent_of, memory)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                agent = await asyncio.shield(opening)
        except NixlUnusable as error:
            raise TransportUnavailable(f"nixl: {error}") from error
        except TimeoutError as error:
            opening.add_done_callback(lambda future: future.exception())  # logged where it was raised
            raise TransportUnavailable("nixl: our agent is still being opened; a later push finds it there") from error
        inline = await super().connect(endpoint, memory, executor, reply_timeout_s)
        name = f"nixl: {endpoint.address}"
        if (shown := shown_by(memory)) is not None:
            return NixlDeviceOutgoing(inline, name, agent, memory, shown)
        return NixlOutgoing(inline, name, agent, memory)

    def accept(
        self, sock: socket.socket, memory: KVMemory, executor: Executor, idle_timeout_s: float
    ) -> NixlIncoming | NixlDeviceIncoming:
        stream = self._accepted(sock, executor, idle_timeout_s)
        if self._device_reader is not None:  # set by receives()
            return NixlDeviceIncoming(stream, memory, self._device_reader)
        return NixlIncoming(stream, memory, self._open_reader)

    def close(self) -> None:
        with self._opening:
            for agent in self._agents.values():
                agent.close()
            self._agents.clear()
            for reader in (self._reader, self._device_reader):
                if reader is not None:
                    reader.close()
            self._reader = self._device_reader = None

    def _open_reader(self) -> Reader:
        with self._opening:
            if self._reader is None:
                self._reader = self._once(Reader)
            return self._reader

    def _open_device_reader(self, shown: ShownPool) -> None:
        with self._opening:
            if self._device_reader is None:
                self._device_reader = self._once(lambda: DeviceReader(shown))

    def _agent_of(self, memory: KVMemory) -> Agent:
        """Return the agent with the pool registered; the first push opens it."""
        shown = shown_by(memory)
        address, num_bytes = _address(memory) if shown is None else shown.address, shape_of(memory).num_bytes
        with self._opening:
            if (address, num_bytes) not in self._agents:
                if shown is not None:
                    shown.enter()
                place = HOST if shown is None else place_of(shown)
                self._agents[address, num_bytes] = self._once(lambda: Agent(address, num_bytes, place))
            return self._agents[address, num_bytes]

    def _once(self, make: Callable[[], T]) -> T:
        """Return the result of `make`; log its failure once. Raises NixlUnusable."""
        if self._problem is not None:
            raise NixlUnusable(self._problem)
        try:
            made = make()
        except NixlUnusable as error:
            self._problem = str(error)
            logger.warning("nixl is not used: %s", error)
            raise
        if self._tls is not None:
            logger.warning("nixl: TLS protects the conversation of a push, but the KV crosses the network in the clear")
        return made


def _is_seen(memory: KVMemory) -> bool:
    """Return whether NIXL can read `memory`: host memory, or a pool on a device that other processes may read."""
    return not isinstance(memory, StagedMemory) or memory.shown is not None


def _address(memory: KVMemory) -> int:
    with memory.memory() as whole:
        return address_of(whole)
