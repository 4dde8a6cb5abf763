"""Frames of the transfer protocol: magic "PDKV", a little-endian length, one TransferMessage. Pure: bytes in, messages out."""

import struct

from google.protobuf.message import DecodeError

from kvtransfer.errors import FrameError
from protos.v1 import transfer_pb2

MAGIC = b"PDKV"
MAX_FRAME_BYTES = 1 << 20
HEADER = struct.Struct("<4sI")


def encode(message: transfer_pb2.TransferMessage) -> bytes:
    """`message` as one frame. Raises FrameError if it is longer than MAX_FRAME_BYTES or holds no message."""
    if message.WhichOneof("message") is None:
        raise FrameError("a frame without a message cannot be sent")
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes exceeds the bound of {MAX_FRAME_BYTES}")
    return HEADER.pack(MAGIC, len(body)) + body


def body_length(header: bytes) -> int:
    """Bytes that follow a header of HEADER.size bytes. Raises FrameError for a wrong magic or an unbounded length."""
    magic, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameError(f"a frame must begin with {MAGIC!r}, got {magic!r}: the peer speaks another protocol")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is outside 1 to {MAX_FRAME_BYTES}")
    return int(length)


def decode(body: bytes) -> transfer_pb2.TransferMessage:
    """The message in `body`. Raises FrameError if there is none, or one that this version does not know."""
    try:
        message = transfer_pb2.TransferMessage.FromString(body)
    except DecodeError as error:
        raise FrameError(f"a frame of {len(body)} bytes holds no TransferMessage: {error}") from error
    if message.WhichOneof("message") is None:
        raise FrameError("a frame holds no message of this protocol version")
    return message
