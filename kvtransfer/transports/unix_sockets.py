"""Transports over abstract Unix sockets, between processes of one user on one host: the kernel says who is at the other end."""

import asyncio
import os
import secrets
import socket
import struct
from concurrent.futures import Executor

from kvtransfer.errors import TransportUnavailable
from kvtransfer.stream import SocketStream
from pdmesh.runtime.identity import host_id
from pdmesh.v1 import common_pb2

CONNECT_TIMEOUT_S = 1.0
BACKLOG = 128
_NAME_PREFIX = "pdmesh-kv-"
_UCRED = struct.Struct("iII")  # pid, uid, gid


class UnixSocketTransport:
    """What those transports have in common."""

    name: str
    gains_by_connections = False  # one costs the memory nothing, and a second one a handshake

    def reaches(self, endpoint: common_pb2.TransferEndpoint) -> bool:
        return endpoint.host_id == host_id()

    def listen(self, host: str, port: int) -> socket.socket:
        """Under a name of its own."""
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
        """To a process of our user. Raises TransportUnavailable."""
        return SocketStream(await _connected(self.name, endpoint.address), executor, reply_timeout_s)

    def _accepted(self, sock: socket.socket, executor: Executor, idle_timeout_s: float) -> SocketStream:
        """Raises PermissionError unless the process at the other end belongs to our user."""
        _check_peer(self.name, sock)
        return SocketStream(sock, executor, idle_timeout_s)


async def _connected(transport: str, name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, "\0" + name)
        _check_peer(transport, sock)  # a stranger who took the name must not get our memory
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
