"""Sockets of the simulated network: what `socket.socket` makes there, TCP within the network and Unix sockets within a host.

A connection carries segments of bytes in order. A sender may have only so many bytes on their way or unread (`_window`, drawn for
each socket), so that writes and reads are partial; what is cut, slow, severed or without power is the network's matter.
"""

from __future__ import annotations

import array
import asyncio
import errno
import itertools
import os
import random
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.simulation.environment.network import Connection, Network
from tests.simulation.world import current_process

DATA, FIN, ACK = range(3)
CLOSED = "the peer closed the connection"
RESET = "connection reset by peer"
_UCRED = struct.Struct("iII")
_numbers = itertools.count(1000)
_installed: list[Callable[[], Network]] = []

Buffer = bytes | bytearray | memoryview


class StreamSocket:
    """A socket of a process, with the methods that the product, asyncio and Redis' client use. It never blocks."""

    def __init__(self, family: int = socket.AF_INET, type: int = socket.SOCK_STREAM, proto: int = 0, fileno: Any = None) -> None:
        process = current_process()
        assert process is not None and fileno is None, "a socket belongs to a simulated process"
        self.family, self.type, self.proto = family, type, proto
        self.process, self._network = process, _installed[0]()
        self._number = next(_numbers)
        self._address: Any = b"" if family == socket.AF_UNIX else ("0.0.0.0", 0)
        self._peer: Any = self._address
        self._is_closed = False
        self._backlog: deque[Connection] | None = None
        self._max_backlog = 0
        self._connection: Connection | None = None
        self._side = 0
        self._inbox, self._fds = bytearray(), list[int]()
        self._window = self._rng.choice((1 << 11, 1 << 13, 1 << 16))
        self._num_unread = 0  # bytes that were sent and that the peer has not read
        self._has_finished, self._is_read_shut = False, False
        self._has_peer_finished, self._is_peer_gone = False, False
        self._error: OSError | None = None
        self._watchers: list[asyncio.Future[None]] = []
        self._callbacks: dict[bool, tuple[Callable[..., object], tuple[Any, ...]]] = {}  # by whether they write

    @property
    def _rng(self) -> random.Random:
        return self._network.world.rng

    # Addresses and options

    def bind(self, address: Any) -> None:
        if self.family == socket.AF_UNIX:
            self._address = address.encode() if isinstance(address, str) else bytes(address)
        else:
            host, port = address[:2]
            self._address = (host, port or self._network.new_port())
        if self._key(self._address) in self._network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")

    def listen(self, backlog: int = 128) -> None:
        self._backlog, self._max_backlog = deque(), backlog
        self._network.listeners[self._key(self._address)] = self

    def getsockname(self) -> Any:
        return self._address

    def getpeername(self) -> Any:
        return self._peer

    def getsockopt(self, level: int, name: int, size: int = 0) -> Any:
        if name == socket.SO_PEERCRED:
            return _UCRED.pack(1, os.geteuid(), os.getegid())
        return bytes(size) if size else 0

    def setsockopt(self, *_: Any) -> None:
        pass

    def setblocking(self, flag: bool) -> None:
        pass

    def settimeout(self, timeout: float | None) -> None:
        pass

    def gettimeout(self) -> float:
        return 0.0

    def fileno(self) -> int:
        return -1 if self._is_closed else self._number

    def __enter__(self) -> StreamSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Connecting

    async def connect_soon(self, address: Any) -> None:
        """Connect; raise ConnectionRefusedError where nothing listens. It waits for ever for a host that does not answer."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str] = loop.create_future()

        def dialled(connection: Connection | None, reason: str) -> None:
            if done.done() or self._is_closed:
                if connection is not None:
                    connection.close(0, CLOSED)
                return
            if connection is not None:
                self._peer = address
                self._join(connection, 0)
            done.set_result(reason)

        key = self._key(address.encode() if isinstance(address, str) else address)
        self._network.dial(self.process, key, dialled)
        if reason := await done:
            raise ConnectionRefusedError(errno.ECONNREFUSED, reason)

    def accept(self, connection: Connection) -> None:
        """Take in a connection, as a listener of the network."""
        if self._backlog is None or len(self._backlog) >= self._max_backlog:
            connection.close(1, RESET)
            return
        self._backlog.append(connection)
        self.changed()

    def take_accepted(self) -> tuple[StreamSocket, Any]:
        """Return the next connection and its peer's address, as `socket.accept`. Raises BlockingIOError without one."""
        self._check_open()
        if not self._backlog:
            raise BlockingIOError(errno.EAGAIN, "no connection waits")
        made = StreamSocket(self.family, self.type)
        made._address, made._peer = self._address, ("0.0.0.0", 1)
        made._join(self._backlog.popleft(), 1)
        return made, made._peer

    def _join(self, connection: Connection, side: int) -> None:
        self._connection, self._side = connection, side
        connection.pings = False
        end = connection.ends[side]
        early, end.early = end.early, []
        end.received, end.broken = self._received, self._broken
        end.is_blocked = lambda: self._num_unread >= self._window
        for message in early:
            self._received(*message)
        if not end.is_open:
            self._broken(end.reason)

    # Bytes

    def send(self, data: Buffer, flags: int = 0) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[Buffer], ancillary: Sequence[Any] = (), flags: int = 0, address: Any = None) -> int:
        """Send what the window has room for, at most; with it the descriptors of an SCM_RIGHTS message."""
        connection = self._check_connected()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._has_finished or self._is_peer_gone:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        room = self._window - self._num_unread
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "the window is full")
        if not self._rng.getrandbits(3):
            room = 1 + self._rng.randrange(room)
        data = bytearray()
        for buffer in buffers:
            data += memoryview(buffer)[: room - len(data)]
        fds = [os.dup(fd) for _, _, content in ancillary for fd in array.array("i", bytes(content))]
        self._num_unread += len(data)
        size = self._rng.choice((100, 1460, 1460, 9000))
        for start in range(0, len(data), size):
            connection.send(self._side, len(data[start : start + size]), DATA, bytes(data[start : start + size]), fds)
            fds = []
        return len(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer)])

    def recv_into(self, buffer: bytearray | memoryview, nbytes: int = 0, flags: int = 0) -> int:
        return self.recvmsg_into([buffer])[0]

    def recvmsg_into(self, buffers: Iterable[bytearray | memoryview], *_: Any) -> tuple[int, list[Any], int, Any]:
        """Fill the buffers with what is there. Raises BlockingIOError when that is nothing."""
        self._check_connected()
        if self._is_read_shut:
            return 0, [], 0, None
        if not self._inbox:
            if self._error is not None:
                error, self._error = self._error, None
                self._has_peer_finished = True
                raise error
            if self._has_peer_finished:
                return 0, [], 0, None
            raise BlockingIOError(errno.EAGAIN, "nothing is there")
        count, limit = 0, len(self._inbox)
        if not self._rng.getrandbits(3):
            limit = 1 + self._rng.randrange(limit)
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            size = min(view.nbytes, limit - count)
            view[:size] = self._inbox[count : count + size]
            count += size
            view.release()
        del self._inbox[:count]
        assert self._connection is not None
        self._connection.send(self._side, 8, ACK, count, ())
        return count, [], 0, None

    def recvmsg(self, size: int, ancillary_size: int = 0, flags: int = 0) -> tuple[bytes, list[Any], int, Any]:
        buffer = bytearray(size)
        count = self.recv_into(buffer)
        fds, self._fds = self._fds, []
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        return bytes(buffer[:count]), rights, 0, None

    def shutdown(self, how: int) -> None:
        connection = self._check_connected()
        if not connection.ends[self._side].is_open:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            self._is_read_shut = True
        if how in (socket.SHUT_WR, socket.SHUT_RDWR) and not self._has_finished:
            self._has_finished = True
            connection.send(self._side, 1, FIN, 0, ())
        self.changed()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._backlog is not None:
            self._network.listeners.pop(self._key(self._address), None)
            for connection in self._backlog:
                connection.close(1, RESET)
        if self._connection is not None and self._connection.ends[self._side].is_open:
            self._connection.close(self._side, RESET if self._inbox else CLOSED)
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self.changed()

    # What waits

    @property
    def is_readable(self) -> bool:
        return bool(
            self._is_closed or self._backlog or self._inbox or self._is_read_shut or self._has_peer_finished or self._error
        )

    @property
    def is_writable(self) -> bool:
        return bool(self._is_closed or self._has_finished or self._is_peer_gone or self._error) or (
            self._connection is not None and self._num_unread < self._window
        )

    async def change(self) -> None:
        """Wait for the next change of what can be read or written."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def watch(self, callback: Callable[..., object], args: tuple[Any, ...], *, write: bool) -> None:
        """Call on the loop whenever it can be read (or written) and something has changed."""
        self._callbacks[write] = (callback, args)
        self._call(write)

    def unwatch(self, *, write: bool) -> bool:
        return self._callbacks.pop(write, None) is not None

    def changed(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)
        for write in tuple(self._callbacks):
            self._call(write)

    def _call(self, write: bool) -> None:
        if self.is_writable if write else self.is_readable:
            callback, args = self._callbacks[write]
            asyncio.get_running_loop().call_soon(callback, *args)

    # What the network brings

    def _received(self, kind: int, content: Any, fds: Sequence[int]) -> None:
        if kind == DATA:
            self._inbox += content
            self._fds += fds
        elif kind == FIN:
            self._has_peer_finished = True
        else:
            self._num_unread -= content
        self.changed()

    def _broken(self, reason: str) -> None:
        """Learn that the peer has closed or reset the connection; the kernel of a process that died does either."""
        if reason == CLOSED or (reason == RESET and self._rng.getrandbits(1)):
            self._has_peer_finished = self._is_peer_gone = True
        else:
            self._error = ConnectionResetError(errno.ECONNRESET, reason)
            self._is_peer_gone = True
            if self._rng.getrandbits(1):
                self._inbox.clear()
        self.changed()

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def _check_connected(self) -> Connection:
        self._check_open()
        if self._connection is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return self._connection

    def _key(self, address: Any) -> str:
        return f"unix:{address!r}" if self.family == socket.AF_UNIX else f"{address[0]}:{address[1]}"


class Poll:
    """What `select.poll` makes: it says at once what can be done now."""

    def __init__(self) -> None:
        self._watched: dict[StreamSocket, int] = {}

    def register(self, sock: StreamSocket, events: int = select.POLLIN | select.POLLOUT) -> None:
        self._watched[sock] = events

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        found = []
        for sock, wanted in self._watched.items():
            events = (select.POLLIN if sock.is_readable else 0) | (select.POLLOUT if sock.is_writable else 0)
            if events & wanted:
                found.append((sock.fileno(), events & wanted))
        return found


def install(network: Callable[[], Network]) -> None:
    """Have `socket.socket` and `select.poll` make simulated ones; parts move through them in Python, not in C++."""
    import kvtransfer.stream

    _installed[:] = [network]
    for owner, name, new in (
        (socket, "socket", StreamSocket),
        (select, "poll", Poll),
        (kvtransfer.stream, "native", lambda: None),
    ):
        setattr(owner, name, new)
