"""Frames of the transfer protocol: magic "PDKV", length and CRC-32C of the body (little-endian), one TransferMessage.

Pure: bytes in, messages out. The checksum is for what decides where KV goes and which token comes next: a flipped bit there would
be a well-formed lie.
"""

import struct

from google.protobuf.message import DecodeError

from kvtransfer.checksum import checksum
from kvtransfer.errors import FrameError
from pdmesh.v1 import transfer_pb2

MAGIC = b"PDKV"
TLS_HANDSHAKE = b"\x16\x03"  # how a peer begins that has certificates
MAX_FRAME_BYTES = 1 << 20
HEADER = struct.Struct("<4sII")


def encode(message: transfer_pb2.TransferMessage) -> bytes:
    """`message` as one frame. Raises FrameError if it is longer than MAX_FRAME_BYTES or holds no message."""
    if message.WhichOneof("message") is None:
        raise FrameError("a frame without a message cannot be sent")
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes exceeds the bound of {MAX_FRAME_BYTES}")
    return HEADER.pack(MAGIC, len(body), checksum([body])) + body


def body_length(header: bytes) -> int:
    """Bytes that follow a header of HEADER.size bytes. Raises FrameError for a wrong magic or an unbounded length."""
    magic, length, _ = HEADER.unpack(header)
    if magic.startswith(TLS_HANDSHAKE):
        raise FrameError("the peer uses TLS and this end does not; give this worker --tls-cert, --tls-key and --tls-ca")
    if magic != MAGIC:
        raise FrameError(f"a frame must begin with {MAGIC!r}, got {magic!r}: the peer speaks another protocol")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is outside 1 to {MAX_FRAME_BYTES}")
    return int(length)


def decode(header: bytes, body: bytes) -> transfer_pb2.TransferMessage:
    """The message in `body`. Raises FrameError if it is damaged, is none, or one that this version does not know."""
    if checksum([body]) != HEADER.unpack(header)[2]:
        raise FrameError(f"a frame of {len(body)} bytes was damaged on its way: its checksum is wrong")
    try:
        message = transfer_pb2.TransferMessage.FromString(body)
    except DecodeError as error:
        raise FrameError(f"a frame of {len(body)} bytes holds no TransferMessage: {error}") from error
    if message.WhichOneof("message") is None:
        raise FrameError("a frame holds no message of this protocol version")
    return message
