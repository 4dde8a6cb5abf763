"""Frames of the transfer protocol: the magic "PDKV", length and CRC-32C of the body (little-endian), and one TransferMessage.

It also computes CRC-32C, of memory or while copying memory. The module does no I/O. The checksum of a frame protects the fields
that decide where KV is written and which token comes next: a flipped bit there would still be a well-formed message.
"""

import struct
from collections.abc import Iterable, Sequence

import crc32c
import numpy as np
from google.protobuf.message import DecodeError

from kvtransfer.errors import FrameError
from kvtransfer.native.library import Runs, address_of, native, pieces_of
from pdmesh.v1 import transfer_pb2

# CRC-32C (Castagnoli, RFC 3720 section 12.1)
#
# The native library computes it where it is loaded; otherwise the `crc32c` package and NumPy do. All of them release the GIL for
# large pieces.


NATIVE_BYTES = 4096  # below this size the call costs more than the sum
STREAM_BYTES = 1 << 20  # from this size on, copies bypass the caches
COPY_BYTES = 256 << 10  # NumPy copies this much, then sums it while it is still in the processor's cache


def extend(value: int, piece: bytes | memoryview) -> int:
    """Return the CRC-32C of some bytes, whose CRC-32C is `value`, followed by `piece`; 0 is the CRC-32C of no bytes."""
    library = native()
    if library is not None and len(piece) >= NATIVE_BYTES:
        return library.sum(value, pieces_of([piece]))
    result: int = crc32c.crc32c(piece, value)
    return result


def checksum(pieces: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32C of all pieces in order, as if they were one."""
    library, pieces = native(), list(pieces)
    if library is not None and sum(map(len, pieces)) >= NATIVE_BYTES:
        return library.sum(0, pieces_of(pieces))
    value = 0
    for piece in pieces:
        value = extend(value, piece)
    return value


def extend_over(value: int, pieces: Sequence[memoryview], num_bytes: int) -> int:
    """Return the CRC-32C `value` extended by the first `num_bytes` of `pieces` (see `extend`)."""
    for piece in pieces:
        with piece[:num_bytes] as beginning:
            value = extend(value, beginning)
        num_bytes -= min(num_bytes, piece.nbytes)
        if num_bytes == 0:
            break
    return value


def copy_runs(value: int, target: memoryview, source: memoryview, runs: Runs, *, is_cold: bool = False) -> int:
    """Copy `runs` (offsets in `target` and `source`, bytes) and return the CRC-32C `value` extended by the copies. The native
    library sums each byte as it stores it: `source` may change meanwhile. `is_cold`: nothing reads the copy soon, so a small one
    bypasses the caches, too."""
    library = native()
    if library is None:
        return _copy_with_numpy(value, target, source, runs.tolist())
    addresses = np.ascontiguousarray(runs + np.array([address_of(target), address_of(source), 0]))
    return library.copy(value, addresses, streams=is_cold or int(runs[:, 2].sum()) >= STREAM_BYTES)


def _copy_with_numpy(value: int, target: memoryview, source: memoryview, runs: Sequence[tuple[int, int, int]]) -> int:
    for to, origin, num_bytes in runs:
        for start in range(0, num_bytes, COPY_BYTES):
            size = min(COPY_BYTES, num_bytes - start)
            with target[to + start : to + start + size] as piece, source[origin + start : origin + start + size] as original:
                np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(original, np.uint8))
                value = extend(value, piece)
    return value


def fill_pieces(value: int, pieces: Sequence[memoryview], source: memoryview) -> tuple[int, int]:
    """Fill `pieces` in order until they or `source` are used up; return the bytes copied and the CRC-32C `value` extended by
    them."""
    ranges: list[tuple[memoryview, int, int]] = []  # a piece, where it begins in `source`, bytes
    num_bytes = 0
    for piece in pieces:
        size = min(piece.nbytes, source.nbytes - num_bytes)
        if size:
            ranges.append((piece, num_bytes, size))
            num_bytes += size
    library = native()
    if library is not None and num_bytes >= NATIVE_BYTES:
        origin = address_of(source)
        runs = np.array([[address_of(piece), origin + start, size] for piece, start, size in ranges], np.int64)
        return num_bytes, library.copy(value, runs, streams=num_bytes >= COPY_BYTES)
    for piece, start, size in ranges:
        with piece[:size] as target, source[start : start + size] as original:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(original, np.uint8))  # releases the GIL
            value = extend(value, target)
    return num_bytes, value


def room_for(num_bytes: int) -> memoryview:
    """Return memory for so many bytes, which holds anything: it is not zeroed."""
    return memoryview(np.empty(num_bytes, np.uint8)).cast("B")  # type: ignore[arg-type]  # numpy's stubs know no buffers


MAGIC = b"PDKV"
TLS_HANDSHAKE = b"\x16\x03"  # the first bytes of a peer that uses TLS
MAX_FRAME_BYTES = 1 << 20
HEADER = struct.Struct("<4sII")


def encode(message: transfer_pb2.TransferMessage) -> bytes:
    """Return `message` as one frame. Raises FrameError if it is longer than MAX_FRAME_BYTES or holds no message."""
    if message.WhichOneof("message") is None:
        raise FrameError("a frame without a message cannot be sent")
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes exceeds the bound of {MAX_FRAME_BYTES}")
    return HEADER.pack(MAGIC, len(body), checksum([body])) + body


def body_length(header: bytes) -> int:
    """Return the length of the body after a header of HEADER.size bytes. Raises FrameError for a wrong magic or a length out of
    bounds."""
    magic, length, _ = HEADER.unpack(header)
    if magic.startswith(TLS_HANDSHAKE):
        raise FrameError("the peer uses TLS and this end does not; give this worker --tls-cert, --tls-key and --tls-ca")
    if magic != MAGIC:
        raise FrameError(f"a frame must begin with {MAGIC!r}, got {magic!r}: the peer speaks another protocol")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is outside 1 to {MAX_FRAME_BYTES}")
    return int(length)


def decode(header: bytes, body: bytes) -> transfer_pb2.TransferMessage:
    """Return the message in `body`. Raises FrameError if it is damaged, is no message, or is unknown to this version."""
    if checksum([body]) != HEADER.unpack(header)[2]:
        raise FrameError(f"a frame of {len(body)} bytes was damaged on its way: its checksum is wrong")
    try:
        message = transfer_pb2.TransferMessage.FromString(body)
    except DecodeError as error:
        raise FrameError(f"a frame of {len(body)} bytes holds no TransferMessage: {error}") from error
    if message.WhichOneof("message") is None:
        raise FrameError("a frame holds no message of this protocol version")
    return message
