"""What every transport offers to the two ends of a session. The session's protocol itself is the same over all of them."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol

from kvtransfer.memory import KVMemory
from kvtransfer.parts import Part
from kvtransfer.stream import Stream
from protos.v1 import common_pb2, transfer_pb2


class Outgoing(Protocol):
    """The sender's end of a connection."""

    @property
    def stream(self) -> Stream: ...

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        """The first frame, with what the receiver needs to reach our memory."""

    async def send_part(
        self,
        header: transfer_pb2.PartHeader,
        views: Sequence[memoryview],
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        """Announce a part whose bytes are `views` and lie in `block_ids` of our pool, have them reach the receiver (or be
        fetched), and return their CRC-32C. on_bytes(count) as they leave."""


class Incoming(Protocol):
    """The receiver's end of a connection."""

    @property
    def stream(self) -> Stream: ...

    async def receive_hello(self) -> transfer_pb2.TransferHello:
        """The first frame. Raises FrameError for another."""

    def prepare(self, hello: transfer_pb2.TransferHello) -> None:
        """Obtain what it takes to reach the sender's memory; its identity and layout are found good. Raises TransferRefused."""

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
        """Give back what was obtained (not the stream); idempotent."""


class Transport(Protocol):
    """One way between two processes, as one sender or one receiver uses it."""

    name: str
    gains_by_connections: bool  # several for one push are faster than one

    def sends(self, memory: KVMemory) -> bool:
        """Can this process send from this memory?"""

    def receives(self) -> bool:
        """Can this process receive by it?"""

    def reaches(self, endpoint: common_pb2.TransferEndpoint) -> bool:
        """Whether `endpoint` can be reached from this host."""

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> Outgoing:
        """Raises TransportUnavailable."""

    def close(self) -> None:
        """Give back what outlives connections; there are none any more. Idempotent."""


class SocketTransport(Transport, Protocol):
    """One that listens on a socket of its own."""

    def listen(self, host: str, port: int) -> socket.socket:
        """A listening socket. Raises OSError."""

    def endpoint(self, listener: socket.socket, advertise: str | None) -> common_pb2.TransferEndpoint:
        """How to reach `listener`; `advertise` is the host that peers see, where there is one."""

    def accept(self, sock: socket.socket, memory: KVMemory, executor: Executor, idle_timeout_s: float) -> Incoming:
        """Take over an accepted connection. Raises PermissionError for a peer that may not use it."""
