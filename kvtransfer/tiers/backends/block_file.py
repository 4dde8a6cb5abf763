"""The file of a block on disk, or its value in a store: a header, then keys and values of all layers, as they are (version 1) or
compressed (version 2, coding.py).

    <folder>/<identity, 16 hex>/<root>/<hash>.<parent>.kv

A file appears under its name when all of it is written, so a half-written one is never found after a crash; what a lost power
supply leaves behind fails its checksum. The header says whose the block is, so a file that was renamed, or copied from another
model's folder, is refused.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.framing import checksum, room_for
from pdmesh.engine.kv_cache.published_blocks import BlockName

MAGIC = b"PDMKVBLK"
VERSION, CODED_VERSION = 1, 2
LAST_VERSION = 255
"""Versions up to here may come; a higher number is damage."""
MAX_NAME_BYTES = 32
IDENTITY_BYTES = 8
_FIELDS = struct.Struct("<8sHBBB3x8s32s32sIII")
_SUM = struct.Struct("<I")
_BEGIN = struct.Struct("<8sH")
HEADER_BYTES = _FIELDS.size + _SUM.size
SUFFIX, PARTIAL = ".kv", ".partial"
_NAME = re.compile(r"([0-9a-f]{2,64})\.([0-9a-f]{2,64})\.kv")
_FOLDER = re.compile(r"[0-9a-f]{2,64}")


class BadBlockFile(ValueError):
    """Raised for a file that does not hold the block that it should; the message says why."""


class UnknownVersion(Exception):
    """Raised for a file of a later version than this program knows: others can read it."""


@dataclass(frozen=True)
class BlockHeader:
    """Hold what a header says of the block behind it. `identity`: a digest of the model, its numbers and the block's shape;
    `num_bytes`, `crc`: of its content; `width`: bytes of a number where it is compressed, else 0; `num_stored`: bytes that
    follow."""

    identity: bytes
    root: bytes
    block_hash: bytes
    num_bytes: int
    crc: int
    width: int
    num_stored: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            MAGIC,
            CODED_VERSION if self.width else VERSION,
            len(self.root),
            len(self.block_hash),
            self.width,
            self.identity,
            self.root,
            self.block_hash,
            self.num_bytes,
            self.num_stored if self.width else 0,
            self.crc,
        )
        return fields + _SUM.pack(checksum([fields]))

    @classmethod
    def unpack(cls, header: bytes) -> BlockHeader:
        """Return the header. Raises BadBlockFile, or UnknownVersion, whose header may have another form from the version on."""
        if len(header) >= _BEGIN.size:
            magic, version = _BEGIN.unpack_from(header)
            if magic == MAGIC and CODED_VERSION < version <= LAST_VERSION:
                raise UnknownVersion(f"it is of version {version}")
        if len(header) < HEADER_BYTES:
            raise BadBlockFile(f"it has {len(header)} of a header's {HEADER_BYTES} bytes")
        fields = header[: _FIELDS.size]
        if _SUM.unpack_from(header, _FIELDS.size)[0] != checksum([fields]):
            raise BadBlockFile("its header's checksum is wrong")
        magic, version, root_bytes, hash_bytes, width, *rest = _FIELDS.unpack(fields)
        if magic != MAGIC or version != (CODED_VERSION if width else VERSION):
            raise BadBlockFile(f"it is of another format: {magic!r} version {version}")
        identity, root, block_hash, num_bytes, num_coded, crc = rest
        num_stored = num_coded if width else num_bytes
        return cls(identity, root[:root_bytes], block_hash[:hash_bytes], num_bytes, crc, width, num_stored)

    def check(self, identity: bytes, name: BlockName, num_bytes: int) -> None:
        """Raise BadBlockFile naming the field that is not as expected."""
        expected = {"identity": identity, "root": name.root, "block_hash": name.block_hash, "num_bytes": num_bytes}
        for field, value in expected.items():
            if getattr(self, field) != value:
                raise BadBlockFile(f"its {field} is another block's")


def relative_path(name: BlockName) -> str:
    """Return where a block's file lies in the folder of its identity."""
    return f"{name.root.hex()}/{name.block_hash.hex()}.{name.parent.hex()}{SUFFIX}"


def name_of(root_folder: str, file_name: str) -> BlockName | None:
    """Return the block that a file should hold, by its path; None: it is no block's file."""
    match = _NAME.fullmatch(file_name)
    if match is None or not _FOLDER.fullmatch(root_folder):
        return None
    try:
        block_hash, parent = map(bytes.fromhex, match.groups())
        return BlockName(bytes.fromhex(root_folder), parent, block_hash)
    except ValueError:  # an odd number of digits
        return None


def is_storable(name: BlockName) -> bool:
    """Return whether a block's hashes fit into a header."""
    return all(1 <= len(part) <= MAX_NAME_BYTES for part in (name.root, name.parent, name.block_hash))


def partial_path(path: Path, serial: str) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(f".{path.name[:32]}.{serial}{PARTIAL}")


def write_all(file: int, parts: list[memoryview]) -> None:
    """Write all of these bytes. Raises OSError."""
    while parts:
        written = os.writev(file, parts)
        while parts and written >= parts[0].nbytes:
            written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][written:]


def open_to_read(path: Path) -> int:
    """Open a file to read; a symlink is refused, and a pipe does not wait for a writer."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def header_of(path: Path) -> bytes:
    """Return the beginning of a file, as long as a header. Raises OSError."""
    file = open_to_read(path)
    try:
        return os.pread(file, HEADER_BYTES, 0)
    finally:
        os.close(file)


def read_file(path: Path, max_bytes: int) -> memoryview:
    """Return what a file holds. Raises OSError, also for a symlink, or BadBlockFile for a longer file or none."""
    file = open_to_read(path)
    try:
        status = os.fstat(file)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise BadBlockFile("it is no file")
        if size > max_bytes:
            raise BadBlockFile(f"it has {size} bytes, not {max_bytes} or less")
        whole = room_for(size)
        position = 0
        while position < size:
            got = os.preadv(file, [whole[position:]], position)
            if not got:
                raise BadBlockFile(f"it ends after {position} bytes")
            position += got
        return whole
    finally:
        os.close(file)
