"""tcp: the bytes of a part follow its header on the socket, straight from and into pool memory.

Socket buffers are left to the kernel, which grows them to megabytes as the link needs; a fixed SO_RCVBUF would turn that off and,
on an untuned host, cap them at 208 KiB.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from kvtransfer.errors import TransportUnavailable
from kvtransfer.memory import KVMemory, part_views
from kvtransfer.parts import Part
from kvtransfer.stream import Stream, expect, release
from protos.v1 import common_pb2, transfer_pb2

CONNECT_TIMEOUT_S = 1.0
BACKLOG = 128


class TcpOutgoing:
    """The sender's end."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        await self.stream.write_message(transfer_pb2.TransferMessage(hello=hello))

    async def send_part(self, header: transfer_pb2.PartHeader, views: Sequence[memoryview], block_ids: Sequence[int]) -> None:
        await self.stream.write_message(transfer_pb2.TransferMessage(part=header))
        await self.stream.send_views(views)


class TcpIncoming:
    """The receiver's end."""

    def __init__(self, stream: Stream, memory: KVMemory) -> None:
        self.stream = stream
        self._memory = memory

    async def receive_hello(self) -> transfer_pb2.TransferHello:
        return (await expect(self.stream, "hello")).hello

    async def receive_part(
        self, header: transfer_pb2.PartHeader, part: Part, block_ids: Sequence[int], on_bytes: Callable[[int], None]
    ) -> int:
        views = part_views(self._memory, part.layers, block_ids)
        try:
            return await self.stream.receive_views(views, on_bytes)
        finally:
            release(views)

    def close(self) -> None:
        """Nothing is held but the stream."""


class TcpTransport:
    """Between any two hosts."""

    name = "tcp"

    def sends(self, memory: KVMemory) -> bool:
        return True

    def receives(self) -> bool:
        return True

    def reaches(self, endpoint: common_pb2.TransferEndpoint) -> bool:
        return True

    def listen(self, host: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)

    def endpoint(self, listener: socket.socket, advertise: str | None) -> common_pb2.TransferEndpoint:
        host, port = listener.getsockname()[:2]
        host = advertise or host
        return common_pb2.TransferEndpoint(transport=self.name, address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> TcpOutgoing:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                host, port = split_address(endpoint.address)
                sock = await _connected(loop, *await _resolve(loop, host, port))
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise TransportUnavailable(f"tcp: cannot connect to {endpoint.address}: {error or 'timed out'}") from error
        return TcpOutgoing(Stream(sock, executor, reply_timeout_s))

    def accept(self, sock: socket.socket, memory: KVMemory, executor: Executor, idle_timeout_s: float) -> TcpIncoming:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return TcpIncoming(Stream(sock, executor, idle_timeout_s), memory)


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[host]:port". Raises ValueError naming what is wrong."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"the address must be host:port, got {address!r}")
    return host.strip("[]"), int(port)


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> tuple[socket.AddressFamily, object]:
    """Family and address of a host; only a name, which may take long, is looked up in a thread."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]


async def _connected(loop: asyncio.AbstractEventLoop, family: socket.AddressFamily, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, address)  # type: ignore[arg-type]  # as getaddrinfo gave it
    except BaseException:
        sock.close()
        raise
    return sock
