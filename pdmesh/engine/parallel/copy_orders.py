"""What rank 0 tells the others of a copy between their pools and a shared piece, and what they answer: on sockets beside that of
the steps, one for each direction, so that no copy waits behind a step.

The block ids of an order lie beside its piece, in the shared memory: an order is short, and a socket takes as many as there are
pieces whether or not the rank listens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pdmesh.engine.parallel.events import Place

_ORDER = struct.Struct("<Q?IIIIQI")
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class Copy:
    """`stores`: from the piece into the pool; else the other way."""

    stores: bool
    piece: int
    layers: range
    num_blocks: int
    after: Place


@dataclass(frozen=True)
class Order:
    number: int
    copy: Copy

    def encode(self) -> bytes:
        copy = self.copy
        ends = (copy.layers.start, copy.layers.stop)
        return _ORDER.pack(self.number, copy.stores, copy.piece, *ends, copy.num_blocks, *copy.after)

    @classmethod
    def decode(cls, payload: bytes | bytearray) -> Order:
        number, stores, piece, start, stop, num_blocks, command, num_layers = _ORDER.unpack(payload)
        return cls(number, Copy(stores, piece, range(start, stop), num_blocks, Place(command, num_layers)))


@dataclass(frozen=True)
class Answer:
    """The copy of this number is through; `error`: what it broke of, empty when it did not."""

    number: int
    error: str = ""

    def encode(self) -> bytes:
        return _NUMBER.pack(self.number) + self.error.encode()

    @classmethod
    def decode(cls, payload: bytes | bytearray) -> Answer:
        (number,) = _NUMBER.unpack_from(payload)
        return cls(number, bytes(payload[_NUMBER.size :]).decode(errors="replace"))
