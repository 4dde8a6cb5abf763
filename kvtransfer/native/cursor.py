"""Moves views through a socket without Python's lock; `kvtransfer.stream.Cursor` is the same in Python."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from kvtransfer.errors import PeerClosed
from kvtransfer.native.library import Native, Position, pieces_of


class NativeCursor:
    """A position in a list of views, which their owner releases when the transfer has ended. `value`: CRC-32C of what moved."""

    def __init__(self, native: Native, views: Sequence[memoryview]) -> None:
        self._native = native
        self._pieces = pieces_of(views)
        self._position = Position()
        self.remaining = int(self._pieces[:, 1].sum())

    @property
    def value(self) -> int:
        return int(self._position.value)

    def send(self, sock: socket.socket, max_ms: int) -> int:
        """Send and sum what the socket takes; returns the bytes sent. Raises OSError."""
        num_bytes = self._native.send(sock.fileno(), self._pieces, self._position, max_ms)
        self._advance(num_bytes)
        return num_bytes

    def receive(self, sock: socket.socket, max_ms: int) -> int:
        """Receive what the socket has; returns the bytes received. Raises PeerClosed, OSError."""
        num_bytes = self._native.receive(sock.fileno(), self._pieces, self._position, max_ms)
        if self._position.error == errno.EPIPE:
            raise PeerClosed(f"the peer closed the connection with {self.remaining - num_bytes} bytes of a part missing")
        self._advance(num_bytes)
        return num_bytes

    def _advance(self, num_bytes: int) -> None:
        self.remaining -= num_bytes
        if error := self._position.error:
            raise OSError(error, os.strerror(error))
