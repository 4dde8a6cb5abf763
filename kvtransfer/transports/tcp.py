"""tcp: the bytes of a part follow its header on the socket, straight from and into pool memory.

Socket buffers are left to the kernel, which grows them to megabytes as the link needs; a fixed SO_RCVBUF would turn that off and,
on an untuned host, cap them at 208 KiB. With certificates the whole stream is encrypted, and a peer without them is refused. With
a mesh secret alone both ends prove that they have it before the first frame.
"""

import asyncio
import socket
from concurrent.futures import Executor

from kvtransfer.errors import TransportUnavailable
from kvtransfer.layout import EVERYWHERE
from kvtransfer.manifest import KVMemory
from kvtransfer.secret_stream import SecretStream
from kvtransfer.stream import SocketStream
from kvtransfer.tls_stream import TlsStream
from kvtransfer.transports.common import InlineIncoming, InlineOutgoing
from pdmesh.runtime.addresses import bare_host, join_address, split_address
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import common_pb2

CONNECT_TIMEOUT_S = 1.0
BACKLOG = 128


class TcpTransport:
    """Transfer between any two hosts; encrypted if `tls` is given, else among those that have `secret`, if that is."""

    name = "tcp"
    reach = EVERYWHERE
    summary = "no copies in Python, several connections"
    is_default = True
    gains_by_connections = True
    max_shown_bytes: int | None = None

    def __init__(self, tls: Tls | None = None, secret: MeshSecret | None = None) -> None:
        self._tls, self._secret = tls, secret

    def sends(self, memory: KVMemory) -> bool:
        return True

    def receives(self, memory: KVMemory) -> bool:
        return True

    def reaches(self, endpoint: common_pb2.TransferEndpoint) -> bool:
        return True

    def listen(self, host: str, port: int) -> socket.socket:
        host = bare_host(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)

    def endpoint(self, listener: socket.socket, advertise: str | None) -> common_pb2.TransferEndpoint:
        host, port = listener.getsockname()[:2]
        address = join_address(advertise or host, port)
        return common_pb2.TransferEndpoint(transport=self.name, address=address, tls=self._tls is not None)

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> InlineOutgoing:
        self._check_agreement(endpoint)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                host, port = split_address(endpoint.address)
                sock = await _connected(loop, *await _resolve(loop, host, port))
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise TransportUnavailable(f"{self.name}: cannot connect to {endpoint.address}: {error or 'timed out'}") from error
        return InlineOutgoing(
            self._stream(sock, executor, reply_timeout_s, server_side=False), f"{self.name}: {endpoint.address}"
        )

    def accept(self, sock: socket.socket, memory: KVMemory, executor: Executor, idle_timeout_s: float) -> InlineIncoming:
        return InlineIncoming(self._accepted(sock, executor, idle_timeout_s))

    def close(self) -> None:
        """Do nothing: nothing outlives the connections."""

    def _accepted(self, sock: socket.socket, executor: Executor, idle_timeout_s: float) -> SocketStream:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._stream(sock, executor, idle_timeout_s, server_side=True)

    def _stream(self, sock: socket.socket, executor: Executor, timeout_s: float, *, server_side: bool) -> SocketStream:
        if self._tls is not None:  # its certificates prove membership, and nobody in between can take the connection over
            return TlsStream(sock, executor, timeout_s, self._tls, server_side=server_side)
        if self._secret is not None:
            return SecretStream(sock, executor, timeout_s, self._secret, server_side=server_side)
        return SocketStream(sock, executor, timeout_s)

    def _check_agreement(self, endpoint: common_pb2.TransferEndpoint) -> None:
        """Raise TransportUnavailable when one end uses TLS and the other does not: nothing goes out unencrypted by accident."""
        if endpoint.tls == (self._tls is not None):
            return
        one, other = ("the receiver", "this worker") if endpoint.tls else ("this worker", "the receiver")
        remedy = f"{one} uses TLS and {other} does not; give {other} --tls-cert, --tls-key and --tls-ca"
        raise TransportUnavailable(f"{self.name}: cannot use {endpoint.address}: {remedy}")


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> tuple[socket.AddressFamily, object]:
    """Return family and address of a host; only a name is looked up in a thread, because that may take long."""
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
        await loop.sock_connect(sock, address)  # type: ignore[arg-type]  # the type is getaddrinfo's
    except BaseException:
        sock.close()
        raise
    return sock
