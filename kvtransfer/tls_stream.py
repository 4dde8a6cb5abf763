"""A stream inside TLS 1.3; both ends have a certificate of the mesh.

OpenSSL works on the non-blocking socket itself: bytes are encrypted out of, and decrypted into, pool memory without another copy.
Each connection runs one call at a time (a sender's thread writes parts while its event loop reads answers), each short. Where
OpenSSL would wait it raises BlockingIOError, like a plain socket; where it fails it raises PeerClosed with the reason.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar, cast

import grpc

from kvtransfer import framing
from kvtransfer.errors import PeerClosed, TransferRefused, code_number
from kvtransfer.stream import Cursor, SocketStream
from pdmesh.runtime.rpc.tls import Tls, explain
from pdmesh.v1 import transfer_pb2

MAX_WRITE_BYTES = 256 << 10  # of one call, because answers are not read meanwhile
HANDSHAKE_RECORD = b"\x16"  # the first byte of a peer that uses TLS
REFUSAL_LINGER_S = 0.5

T = TypeVar("T")


class TlsStream(SocketStream):
    """Implement a stream over `sock` within TLS. open() does the handshake; nothing else may come before it."""

    def __init__(self, sock: socket.socket, executor: Executor, idle_timeout_s: float, tls: Tls, *, server_side: bool) -> None:
        sock.setblocking(False)
        context = tls.server_context() if server_side else tls.client_context()
        self._tls_sock = context.wrap_socket(
            sock, server_side, do_handshake_on_connect=False, server_hostname=None if server_side else tls.name
        )
        super().__init__(self._tls_sock, executor, idle_timeout_s)
        self._name = tls.name
        self._is_server = server_side
        self._one_call = threading.Lock()

    async def open(self) -> None:
        """Do the handshake, in threads. Raises PeerClosed with the reason of a failure, TransferRefused for a sender that is no
        member of the mesh. The caller bounds the time."""
        if self._tls_sock.version() is not None:
            return
        if self._is_server:
            await self._check_speaks_tls()
        try:
            while (wants_write := await self.run(self._handshake_turn)) is not None:
                await self._wait(write=wants_write)
        except PeerClosed:
            await self._drain(REFUSAL_LINGER_S)  # otherwise the reset of the connection overtakes our alert
            raise
        if self._is_server:
            self._check_member()

    async def write_bytes(self, data: bytes) -> None:
        view = memoryview(data)
        async with asyncio.timeout(self.idle_timeout_s):
            while view:
                try:
                    view = view[self._call(self._tls_sock.write, view) :]
                except BlockingIOError:
                    await self._wait(write=True)

    async def linger(self, timeout_s: float) -> None:
        with suppress(OSError):
            self._call(self._tls_sock.unwrap)  # send close_notify without waiting for the peer's
        await self._drain(timeout_s)

    def _handshake_turn(self) -> bool | None:
        """Do one step of the handshake, in a thread; return None when it is done, else whether the next step waits until the
        socket can be written."""
        self.check_interrupted()
        try:
            with self._one_call:
                self._tls_sock.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            return True
        except OSError as error:
            raise PeerClosed(f"the TLS handshake failed: {explain(error)}") from error
        return None

    async def _check_speaks_tls(self) -> None:
        """Answer a sender without TLS in a way that it can read."""
        await self._wait(write=False)
        first = socket.socket.recv(self._tls_sock, 1, socket.MSG_PEEK)
        if not first:
            raise PeerClosed("the peer closed the connection before the TLS handshake")
        if first == HANDSHAKE_RECORD:
            return
        if framing.MAGIC.startswith(first):
            with suppress(OSError):
                socket.socket.send(self._tls_sock, framing.encode(_no_tls_reply()))
        await self._drain(REFUSAL_LINGER_S)
        raise PeerClosed(
            "the peer does not use TLS, and this port takes nothing else; give the sender --tls-cert, --tls-key, --tls-ca"
        )

    def _check_member(self) -> None:
        certificate = self._tls_sock.getpeercert() or {}
        alternatives = cast(tuple[tuple[str, str], ...], certificate.get("subjectAltName", ()))
        names = [value for kind, value in alternatives if kind == "DNS"]
        if self._name not in names:
            shown = ", ".join(names) or "no name"
            problem = f"the sender's certificate carries {shown}; only those with {self._name!r} are of the mesh"
            raise TransferRefused(grpc.StatusCode.UNAUTHENTICATED, problem)

    def _cursor(self, views: Sequence[memoryview]) -> Cursor:
        return Cursor(views)  # the native cursor would bypass OpenSSL

    def _send_some(self, pieces: Sequence[memoryview]) -> int:
        """Send `pieces`, each in one call. OpenSSL requires that a call that could not finish is repeated with the same bytes:
        the cursor stays where it was."""
        done = 0
        for piece in pieces:
            try:
                with piece[:MAX_WRITE_BYTES] as view:
                    count = self._call(self._tls_sock.write, view)
            except BlockingIOError:
                return _or_blocked(done)
            done += count
            if count < piece.nbytes:
                break
        return done

    def _receive_some(self, pieces: Sequence[memoryview]) -> int:
        """Receive at most a record, 16 KiB, in one call."""
        done = 0
        for piece in pieces:
            filled = 0
            while filled < piece.nbytes:
                try:
                    with piece[filled:] as view:
                        count = self._read(view)
                except BlockingIOError:
                    return _or_blocked(done)
                if count == 0:
                    return done
                filled, done = filled + count, done + count
        return done

    async def _receive_into(self, view: memoryview) -> int:
        while True:
            try:
                return self._read(view)
            except BlockingIOError:
                await self._wait(write=False)

    def _read(self, view: memoryview) -> int:
        # With a buffer it returns a count, which the type stubs do not know.
        return self._call(cast("Callable[[int, memoryview], int]", self._tls_sock.read), view.nbytes, view)

    def _call(self, act: Callable[..., T], *args: object) -> T:
        """Call `act`, which is read or write: send and recv_into would go on unencrypted if TLS had been removed.

        After the handshake TLS 1.3 reads only to read and writes only to write, so it waits for what the caller asked for."""
        try:
            with self._one_call:
                return act(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise PeerClosed(f"TLS: {explain(error)}") from error

    async def _drain(self, timeout_s: float) -> None:
        """Close our direction, then discard what the peer still sends, encrypted, until it closes too."""
        sink = bytearray(1 << 16)
        with suppress(OSError, TimeoutError):
            self._shutdown(socket.SHUT_WR)
            async with asyncio.timeout(timeout_s):
                while await self._receive_raw(sink):
                    pass

    async def _receive_raw(self, sink: bytearray) -> int:
        while True:
            try:
                return socket.socket.recv_into(self._tls_sock, sink)
            except BlockingIOError:
                await self._wait(write=False)

    def _shutdown(self, how: int) -> None:
        # SSLSocket's own method would remove TLS first, while a thread may be about to send.
        socket.socket.shutdown(self._tls_sock, how)


def _or_blocked(num_bytes: int) -> int:
    if num_bytes == 0:
        raise BlockingIOError
    return num_bytes


def _no_tls_reply() -> transfer_pb2.TransferMessage:
    reply = transfer_pb2.TransferReply(
        code=code_number(grpc.StatusCode.UNAUTHENTICATED),
        message="this receiver takes pushes over TLS only; give the sender --tls-cert, --tls-key and --tls-ca",
    )
    return transfer_pb2.TransferMessage(hello_reply=reply)
