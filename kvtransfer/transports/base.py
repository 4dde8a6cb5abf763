"""The interface of transports for the two ends of a push. The protocol of a push is the same over all of them."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvtransfer.layout import Reach
from kvtransfer.manifest import KVMemory, Part
from kvtransfer.stream import Stream
from pdmesh.v1 import common_pb2, transfer_pb2

if TYPE_CHECKING:  # transfers of KV in CPU memory need no torch
    from pdmesh.engine.kv_cache.streams import Mark


class Outgoing(Protocol):
    """Send parts at the sender's end of a connection."""

    @property
    def stream(self) -> Stream: ...

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        """Send the first frame, with the data by which the receiver reaches our memory."""

    async def send_part(
        self,
        header: transfer_pb2.PartHeader,
        views: Sequence[memoryview],
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        """Announce a part whose bytes are `views` and lie in `block_ids` of our pool, send them (or let the receiver read them),
        and return their CRC-32C (word_sum: DeviceReadSource). on_bytes(count) is called as they leave."""


@runtime_checkable
class DeviceReadSource(Outgoing, Protocol):
    """Send parts that the receiver's device reads in place: they have no views, and a PartEnd has a word_sum."""

    async def settle(
        self, layers: range, block_ids: Sequence[int], after: Mark, say_alive: Callable[[], Awaitable[None]]
    ) -> None:
        """Return when the device has computed (`after`) and summed the part that `send_part` sends next; send keepalives
        meanwhile. When cancelled, it returns once nothing reads the blocks any more."""


class Incoming(Protocol):
    """Receive parts at the receiver's end of a connection."""

    @property
    def stream(self) -> Stream: ...

    async def receive_hello(self) -> transfer_pb2.TransferHello:
        """Return the first frame. Raises FrameError if it is not a hello."""

    async def prepare(self, hello: transfer_pb2.TransferHello) -> None:
        """Obtain access to the sender's memory, once its identity and layout have been checked. Raises TransferRefused:
        UNIMPLEMENTED makes the sender take another transport."""

    async def receive_part(
        self,
        header: transfer_pb2.PartHeader,
        part: Part,
        memory: KVMemory,
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        """Write the part into `block_ids` of `memory` and return the CRC-32C of what was written.

        on_bytes(count) is called on the event loop as bytes arrive; it may raise to stop the writing.
        """

    def close(self) -> None:
        """Release what `prepare` obtained (not the stream); idempotent."""


@runtime_checkable
class DeviceReadTarget(Incoming, Protocol):
    """Receive parts that a device writes into its pool, in the sender's layout."""

    async def pull_part(self, header: transfer_pb2.PartHeader, part: Part, block_ids: Sequence[int], after: Mark) -> int:
        """Write the part into `block_ids` of the pool once the mark `after` is reached; return the word_sum of what was stored.
        Nothing is written any more when it returns or raises. Raises TransferRefused."""


class Transport(Protocol):
    """Connect two processes, on behalf of one sender or one receiver. A new transport is a module that defines this class and a
    line in `registry.py`."""

    name: str
    reach: Reach  # workers register it, and routers compare it
    summary: str  # its advantage, in a few words
    is_default: bool  # workers offer it unless they are told which to offer
    gains_by_connections: bool  # several connections for one push are faster than one

    @property
    def max_shown_bytes(self) -> int | None:
        """Return the largest part of a pool that other devices read in place; None: the transport does not read in place."""

    def sends(self, memory: KVMemory) -> bool:
        """Return whether this process can send from this memory."""

    def receives(self, memory: KVMemory) -> bool:
        """Return whether this process can receive into this memory."""

    def reaches(self, endpoint: common_pb2.TransferEndpoint) -> bool:
        """Return whether `endpoint` can be reached from this host."""

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> Outgoing:
        """Connect to `endpoint`. Raises TransportUnavailable."""

    def close(self) -> None:
        """Release what outlives connections, after the last one has ended. Idempotent."""


@runtime_checkable
class SocketTransport(Transport, Protocol):
    """Connect over a listening socket of the transport's own."""

    def listen(self, host: str, port: int) -> socket.socket:
        """Return a listening socket. Raises OSError."""

    def endpoint(self, listener: socket.socket, advertise: str | None) -> common_pb2.TransferEndpoint:
        """Return the endpoint of `listener`; `advertise` is the host that peers see, where the address has one."""

    def accept(self, sock: socket.socket, memory: KVMemory, executor: Executor, idle_timeout_s: float) -> Incoming:
        """Take over an accepted connection. Raises PermissionError for a peer that may not use it."""
