"""What asyncio's loop does with sockets, over simulated ones: waiting, connecting, and transports of streams."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

READ_BYTES = 1 << 16
HIGH_WATER, LOW_WATER = 1 << 16, 1 << 14


class SocketCalls:
    """The calls of a loop that take a socket, or make one."""

    def add_reader(self, sock: Any, callback: Callable[..., object], *args: Any) -> None:
        sock.watch(callback, args, write=False)

    def add_writer(self, sock: Any, callback: Callable[..., object], *args: Any) -> None:
        sock.watch(callback, args, write=True)

    def remove_reader(self, sock: Any) -> bool:
        return bool(sock.unwatch(write=False))

    def remove_writer(self, sock: Any) -> bool:
        return bool(sock.unwatch(write=True))

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await sock.connect_soon(address)

    async def sock_accept(self, sock: Any) -> tuple[Any, Any]:
        return await _when_ready(sock, sock.take_accepted)  # type: ignore[no-any-return]

    async def sock_recv(self, sock: Any, num_bytes: int) -> bytes:
        return await _when_ready(sock, sock.recv, num_bytes)  # type: ignore[no-any-return]

    async def sock_recv_into(self, sock: Any, buffer: Any) -> int:
        return await _when_ready(sock, sock.recv_into, buffer)  # type: ignore[no-any-return]

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        view = memoryview(data)
        while view.nbytes:
            view = view[await _when_ready(sock, sock.send, view) :]

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect to a listener, of a socket or of gRPC; the latter gets no bytes, which suffices to knock."""
        sock: Any = socket.socket()
        try:
            await sock.connect_soon((host, port))
        except BaseException:
            sock.close()
            raise
        protocol = protocol_factory()
        return StreamTransport(sock, protocol), protocol

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> StreamServer:
        sock: Any = socket.socket()
        sock.bind((host, port))
        sock.listen()
        return StreamServer(sock, protocol_factory)


async def _when_ready(sock: Any, action: Callable[..., Any], *args: Any) -> Any:
    while True:
        try:
            return action(*args)
        except BlockingIOError:
            await sock.change()


class StreamServer:
    """What asyncio's `create_server` returns."""

    def __init__(self, sock: Any, protocol_factory: Callable[[], Any]) -> None:
        self.sockets = (sock,)
        self._factory = protocol_factory
        self._accepting = asyncio.ensure_future(self._accept(sock))

    async def _accept(self, listener: Any) -> None:
        while True:
            sock, _ = await _when_ready(listener, listener.take_accepted)
            StreamTransport(sock, self._factory())

    def close(self) -> None:
        self._accepting.cancel()
        self.sockets[0].close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, return_exceptions=True)


class StreamTransport(asyncio.Transport):
    """A transport between a socket and a protocol."""

    def __init__(self, sock: Any, protocol: Any) -> None:
        super().__init__({"socket": sock, "peername": sock.getpeername(), "sockname": sock.getsockname()})
        self._sock, self._protocol = sock, protocol
        self._loop = asyncio.get_running_loop()
        self._outbox = bytearray()
        self._is_closing = self._is_over = self._is_paused = self._is_full = self._ends = False
        self._loop.call_soon(protocol.connection_made, self)
        self._loop.call_soon(self.resume_reading)

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return not self._is_paused

    def pause_reading(self) -> None:
        self._is_paused = True
        self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_closing:
            self._loop.add_reader(self._sock, self._readable)

    def write(self, data: Any) -> None:
        if self._is_closing or self._ends:
            return
        self._outbox += data
        self._flush()
        if len(self._outbox) > HIGH_WATER and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._ends = True
        self._flush()

    def get_write_buffer_size(self) -> int:
        return len(self._outbox)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return LOW_WATER, HIGH_WATER

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._loop.remove_reader(self._sock)
        self._flush()

    def abort(self) -> None:
        self._outbox.clear()
        self._finish(None)

    def _readable(self) -> None:
        if self._is_paused or self._is_closing:
            return
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(error)
            return
        if data:
            self._protocol.data_received(data)
            if self._sock.is_readable:
                self._loop.call_soon(self._readable)
        else:
            self._loop.remove_reader(self._sock)
            if not self._protocol.eof_received():
                self.close()

    def _flush(self) -> None:
        if self._is_over:
            return
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox)]
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError as error:
            self._finish(error)
            return
        self._loop.remove_writer(self._sock)
        if self._is_full and len(self._outbox) <= LOW_WATER:
            self._is_full = False
            self._protocol.resume_writing()
        if self._is_closing:
            self._finish(None)
        elif self._ends:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._finish(error)

    def _finish(self, error: OSError | None) -> None:
        if self._is_over:
            return
        self._is_over = self._is_closing = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
