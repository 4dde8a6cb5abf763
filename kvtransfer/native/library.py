"""The C boundary of the KV transfer library: its tiers (tiers.h) and the functions of transfer.cpp with their types.

python -m kvtransfer.native.library [--output FOLDER]       compiles ahead, like pdmesh.engine.kernels.cpu.build
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from ctypes import c_char_p, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtransfer.errors import PeerClosed
from pdmesh.engine.kernels.cpu import build

PROJECT = build.Project(
    Path(__file__).parent,
    library="libpdmesh_kv.so",
    title="KV transfer library",
    module="kvtransfer.native.library",
    compile_s=3,
    is_tiered=False,
)

Pieces: TypeAlias = NDArray[np.int64]  # [num_pieces, 2]: address, bytes
Runs: TypeAlias = NDArray[np.int64]  # [num_runs, 3]: address of the copy, address of the original, bytes

_SIGNATURES = {
    "pdmesh_kv_tier_name": (c_char_p, (c_int32,)),
    "pdmesh_kv_has_tier": (c_int32, (c_int32,)),
    "pdmesh_kv_sum": (c_uint32, (c_int32, c_uint32, c_void_p, c_int64)),
    "pdmesh_kv_copy": (c_uint32, (c_int32, c_uint32, c_void_p, c_int64, c_int32)),
    "pdmesh_kv_receive": (c_int64, (c_int32, c_int32, c_void_p, c_int64, c_void_p, c_int64)),
    "pdmesh_kv_send": (c_int64, (c_int32, c_int32, c_void_p, c_int64, c_void_p, c_int64)),
}
_KNOWN = (b"123456789", 0xE3069283)  # the check value in every list of CRCs


class Position(ctypes.Structure):
    """Hold the position of a transfer through a socket in a list of pieces; `Cursor` in transfer.cpp."""

    _fields_ = (("index", c_int64), ("offset", c_int64), ("value", c_uint32), ("error", c_int32))


class Native:
    """Call the library in one tier. A caller that passes addresses keeps the memory behind them; the library does not check
    them."""

    def __init__(self, library: ctypes.CDLL, tier: str | None = None) -> None:
        """Select the tier by name; None: the best that this processor has. Raises ValueError for a tier that it lacks and for a
        library that does not compute CRC-32C, AttributeError for a library with other functions."""
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        present = self.tiers()
        if tier is not None and tier not in present:
            raise ValueError(f"tier: {tier!r} is not among {', '.join(present)}, which this processor has")
        self.tier = tier or next(iter(present))
        self._tier = present[self.tier]
        if self.tier != "unsummed" and self.sum(0, pieces_of([_KNOWN[0]])) != _KNOWN[1]:
            raise ValueError(f"the KV transfer library computes no CRC-32C in tier {self.tier}")

    def tiers(self) -> dict[str, int]:
        """Return the numbers of the tiers that this processor has, by name, best first. "unsummed" copies and computes no
        checksum."""
        numbers: dict[str, int] = {}
        index = 0
        while name := self._library.pdmesh_kv_tier_name(index):
            if self._library.pdmesh_kv_has_tier(index):
                numbers[name.decode()] = index
            index += 1
        return numbers

    def sum(self, value: int, pieces: Pieces) -> int:
        """Return the CRC-32C `value` extended by all pieces."""
        result: int = self._library.pdmesh_kv_sum(self._tier, value, pieces.ctypes.data, len(pieces))
        return result

    def copy(self, value: int, runs: Runs, *, streams: bool) -> int:
        """Copy `runs` and return the CRC-32C `value` extended by the copies. `streams`: bypass the caches."""
        result: int = self._library.pdmesh_kv_copy(self._tier, value, runs.ctypes.data, len(runs), streams)
        return result

    def receive(self, fd: int, pieces: Pieces, position: Position, max_ms: int) -> int:
        """Receive and sum for at most max_ms; return the number of bytes. position.error: an errno; EPIPE when the peer has
        closed."""
        result: int = self._library.pdmesh_kv_receive(
            self._tier, fd, pieces.ctypes.data, len(pieces), ctypes.addressof(position), max_ms
        )
        return result

    def send(self, fd: int, pieces: Pieces, position: Position, max_ms: int) -> int:
        """Send and sum for at most max_ms; return the number of bytes. position.error: an errno."""
        result: int = self._library.pdmesh_kv_send(
            self._tier, fd, pieces.ctypes.data, len(pieces), ctypes.addressof(position), max_ms
        )
        return result


class _Loaded:
    """Hold the library of this process, once `prepare` has loaded it."""

    native: Native | None = None
    is_tried = False
    lock = threading.Lock()


def prepare() -> None:
    """Load the library, after compiling it if need be; takes seconds the first time on a machine, so call it in a thread.

    Never raises: without a compiler, or after any other error, Python does the same work.
    """
    with _Loaded.lock:
        if not _Loaded.is_tried:
            _Loaded.is_tried = True
            _Loaded.native = _load()


def native() -> Native | None:
    """Return the library; None if `prepare` has not loaded it."""
    return _Loaded.native


def use(chosen: Native | None) -> None:
    """Use `chosen`, or no library, from now on; for tests and benchmarks."""
    with _Loaded.lock:
        _Loaded.is_tried, _Loaded.native = True, chosen


def _load() -> Native | None:
    try:
        return Native(build.load_library(lambda _text: None, project=PROJECT))
    except (build.NoCompiler, build.BuildFailed, OSError, ValueError, AttributeError):
        return None


def address_of(memory: bytes | memoryview) -> int:
    """Return the address of the first byte of `memory`; it is valid as long as the memory is."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def pieces_of(memories: Iterable[bytes | memoryview]) -> Pieces:
    """Return the addresses and sizes of `memories`; empty memories are left out."""
    rows = [(address_of(memory), size) for memory in memories if (size := memoryview(memory).nbytes)]
    return np.array(rows, np.int64).reshape(-1, 2)


# Moving views through a socket without the GIL; `kvtransfer.stream.Cursor` is the same in Python


class NativeCursor:
    """Hold a position in a list of views, which their owner releases when the transfer has ended. `value`: CRC-32C of the bytes
    moved."""

    def __init__(self, native: Native, views: Sequence[memoryview]) -> None:
        self._native = native
        self._pieces = pieces_of(views)
        self._position = Position()
        self.remaining = int(self._pieces[:, 1].sum())

    @property
    def value(self) -> int:
        return int(self._position.value)

    def send(self, sock: socket.socket, max_ms: int) -> int:
        """Send and sum what the socket takes; return the bytes sent. Raises OSError."""
        num_bytes = self._native.send(sock.fileno(), self._pieces, self._position, max_ms)
        self._advance(num_bytes)
        return num_bytes

    def receive(self, sock: socket.socket, max_ms: int) -> int:
        """Receive what the socket has; return the bytes received. Raises PeerClosed, OSError."""
        num_bytes = self._native.receive(sock.fileno(), self._pieces, self._position, max_ms)
        if self._position.error == errno.EPIPE:
            raise PeerClosed(f"the peer closed the connection with {self.remaining - num_bytes} bytes of a part missing")
        self._advance(num_bytes)
        return num_bytes

    def _advance(self, num_bytes: int) -> None:
        self.remaining -= num_bytes
        if error := self._position.error:
            raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    build.main(project=PROJECT)
