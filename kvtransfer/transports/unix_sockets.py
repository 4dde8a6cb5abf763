"""Abstract Unix sockets between processes of one user on one host: the kernel says who is at the other end."""

import asyncio
import os
import secrets
import socket
import struct

from kvtransfer.errors import TransportUnavailable

CONNECT_TIMEOUT_S = 1.0
BACKLOG = 128
_NAME_PREFIX = "pdmesh-kv-"
_UCRED = struct.Struct("iII")  # pid, uid, gid


def listen() -> socket.socket:
    """Under a name of its own. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + _NAME_PREFIX + secrets.token_hex(16))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def name_of(listener: socket.socket) -> str:
    """As peers connect to it."""
    name: bytes = listener.getsockname()
    return name[1:].decode("ascii")


async def connect(transport: str, name: str) -> socket.socket:
    """To a process of our user. Raises TransportUnavailable."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, "\0" + name)
        check_peer(transport, sock)  # a stranger who took the name must not get our memory
    except (OSError, ValueError) as error:
        sock.close()
        raise TransportUnavailable(f"{transport}: cannot connect to {name}: {error or 'timed out'}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(transport: str, sock: socket.socket) -> None:
    """Raises PermissionError unless the process at the other end belongs to our user."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise PermissionError(f"{transport}: the peer runs as user {uid}, we as {os.geteuid()}")
