"""Lossless compression of blocks: the most significant byte of each number goes through zstd, the others stay as they are.

    numbers   s e e e e e e e  e m m m m m m m      bfloat16: 3 bits of the first byte are news, 8 of the second
    stored    all second bytes │ a zstd frame of all first bytes

The exponents of KV lie close to each other, its mantissas are noise: what is not noise is compressed at the speed of a Huffman
decoder. docs/kv_store.md has the ratios and rates.
"""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtransfer.framing import room_for
from kvtransfer.tiers.backends.block_file import HEADER_BYTES, BadBlockFile, BlockHeader, UnknownVersion
from kvtransfer.tiers.base import BlockBytes
from pdmesh.engine.kv_cache.published_blocks import BlockName

if TYPE_CHECKING:
    import zstandard

LEVEL = 1
WORTH = 0.97
"""A block is stored as it is unless it becomes smaller than this share."""
REMEDY = "pip install 'pdmesh[compression]'"

_contexts = threading.local()  # those of zstandard may be used by one thread at a time


class CannotDecode(Exception):
    """Raised for a block that other workers can read: a compressed one where the package zstandard is not installed, or one of a
    later version."""


@dataclass(frozen=True)
class BlockForm:
    """Make values of blocks, header and content, as files and stores hold them, and blocks of values. `identity`: 8 bytes that
    stand for the model, its numbers and the block's shape. `width`: bytes of a number; 0: what is written is not compressed."""

    identity: bytes
    block_bytes: int
    width: int = 0

    @property
    def max_bytes(self) -> int:
        """Return how long a value may be."""
        return HEADER_BYTES + self.block_bytes

    def pack(self, name: BlockName, block: BlockBytes) -> list[memoryview]:
        """Return a value, in pieces."""
        coded = encode(block.content, self.width) if self.width else None
        width, pieces = (0, [block.content]) if coded is None else (self.width, coded)
        num_stored = sum(piece.nbytes for piece in pieces)
        header = BlockHeader(self.identity, name.root, name.block_hash, self.block_bytes, block.crc, width, num_stored)
        return [memoryview(header.pack()), *pieces]

    def unpack(self, name: BlockName, value: memoryview) -> BlockBytes:
        """Return the block that a value holds; its content is not checked. Raises BadBlockFile, CannotDecode."""
        try:
            header = BlockHeader.unpack(bytes(value[:HEADER_BYTES]))
        except UnknownVersion as error:
            raise CannotDecode(str(error)) from error
        header.check(self.identity, name, self.block_bytes)
        stored = value[HEADER_BYTES:]
        if stored.nbytes != header.num_stored:
            raise BadBlockFile(f"it has {value.nbytes} bytes, not {HEADER_BYTES + header.num_stored}")
        content = decode(stored, self.block_bytes, header.width) if header.width else stored
        return BlockBytes(content, header.crc)


@cache
def is_installed() -> bool:
    """Return whether the package zstandard is there."""
    return importlib.util.find_spec("zstandard") is not None


def encode(content: memoryview, width: int) -> list[memoryview] | None:
    """Return the compressed content, `width` bytes being a number; None: it does not become smaller."""
    numbers = np.frombuffer(content, np.uint8).reshape(-1, width)
    frame = memoryview(_compressor().compress(_bytes_of(numbers[:, -1])))
    rest = _bytes_of(numbers[:, :-1])
    return [rest, frame] if rest.nbytes + frame.nbytes < WORTH * content.nbytes else None


def decode(stored: memoryview, num_bytes: int, width: int) -> memoryview:
    """Return the content, `num_bytes` and never more. Raises BadBlockFile, CannotDecode."""
    if width < 1 or num_bytes % width:
        raise BadBlockFile(f"its {num_bytes} bytes are no numbers of {width}")
    count = num_bytes // width
    content = room_for(num_bytes)
    numbers = np.frombuffer(content, np.uint8).reshape(count, width)
    rest = count * (width - 1)
    if stored.nbytes < rest:
        raise BadBlockFile(f"it ends after {stored.nbytes} bytes")
    numbers[:, -1] = np.frombuffer(_decompressed(stored[rest:], count), np.uint8)
    numbers[:, :-1] = np.frombuffer(stored[:rest], np.uint8).reshape(count, width - 1)
    return content


def _bytes_of(array: NDArray[np.uint8]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B")  # type: ignore[arg-type]  # numpy's stubs know no buffers


def _decompressed(frame: memoryview, num_bytes: int) -> bytes:
    if not is_installed():
        raise CannotDecode(f"it is compressed, and zstandard is not installed: {REMEDY}")
    import zstandard

    try:
        # A frame says how long its content is, and the decoder never gives more; without this it would give what the frame says.
        if zstandard.frame_content_size(frame) != num_bytes:
            raise BadBlockFile("its compressed part is of another length")
        content: bytes = _decompressor().decompress(frame, max_output_size=num_bytes)
    except zstandard.ZstdError as error:
        raise BadBlockFile(f"it cannot be decompressed: {error}") from error
    return content


def _compressor() -> zstandard.ZstdCompressor:
    import zstandard

    if not hasattr(_contexts, "compressor"):
        _contexts.compressor = zstandard.ZstdCompressor(level=LEVEL)
    found: zstandard.ZstdCompressor = _contexts.compressor
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    import zstandard

    if not hasattr(_contexts, "decompressor"):
        _contexts.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _contexts.decompressor
    return found
