"""A file of packed weights: what the CPU kernels read, as it lies in memory, to be mapped instead of packed anew.

    magic          8 bytes, with the revision of this format
    length         8 bytes, little-endian: of the header
    content        32 bytes: SHA-256 of everything behind the header
    seal           32 bytes: SHA-256 of the three before it and of the header
    header         JSON: the key (packed_cache.py), the tree of weights, and dtype, shape and offset of each tensor
    tensors        each at a multiple of 64 bytes of the file, in the order in which a step streams them; then zeros

The size is a multiple of 2 MiB, and it is written in pieces of several: file systems that support it (ext4 since Linux 6.16) then
keep it in large pages, which a mapping shares. Opening checks seal, key and size; the content's hash is checked unless the caller
knows that the file has not changed since it was (`is_known`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pdmesh.engine.kernels.cpu.library import allocate
from pdmesh.engine.kernels.cpu.model import (
    PackedExperts,
    PackedLatent,
    PackedLayer,
    PackedLinear,
    PackedMLP,
    PackedNorm,
    PackedRope,
    PackedWeights,
)
from pdmesh.engine.models.config import ExpertsConfig, LatentConfig, ModelConfig
from pdmesh.platform import huge_pages
from pdmesh.platform.capabilities import HUGE_PAGES

Progress = Callable[[float, str], None]

_MAGIC = b"PDMPACK\x01"
_PREFIX = struct.Struct("<8sQ32s32s")
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_CHUNK = 8 * huge_pages.HUGE_PAGE
_MAX_HEADER = 256 * 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PARTS = (PackedWeights, PackedLayer, PackedLinear, PackedNorm, PackedMLP, PackedExperts, PackedLatent, PackedRope)
_TYPES: dict[str, Callable[..., object]] = {part.__name__: part for part in _PARTS}


class NotShared(Exception):
    """The file is whole, but not in large pages, and no copy was asked for."""


class UnusableFile(ValueError):
    """The file is damaged, cut off, another model's or another version's. The message says which."""


# The tree of weights as JSON. What config.json says is not stored: it is the key's.


class _Tree:
    """Turn weights into JSON and `tensors`, numbered as they are met."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def of(self, value: object) -> object:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return {"tensor": len(self.tensors) - 1}
        if isinstance(value, ExpertsConfig | LatentConfig):
            return {"config": "experts" if isinstance(value, ExpertsConfig) else "latent"}
        if is_dataclass(value) and type(value).__name__ in _TYPES:
            return {type(value).__name__: {part.name: self.of(getattr(value, part.name)) for part in fields(value)}}
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [self.of(each) for each in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"packed weights hold {type(value).__name__}, which packed_file.py does not know")


def _built(node: object, tensors: list[Tensor], config: ModelConfig) -> object:
    """Return what `_Tree.of` was given. Raises LookupError, TypeError or ValueError for a tree of another version."""
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "config":
        return {"experts": config.experts, "latent": config.latent}[content]
    if kind in ("list", "tuple"):
        parts = [_built(each, tensors, config) for each in content]
        return parts if kind == "list" else tuple(parts)
    return _TYPES[kind](**{name: _built(each, tensors, config) for name, each in content.items()})


# Writing


def write(file: BinaryIO, weights: PackedWeights, key: str, progress: Progress = lambda _share, _text: None) -> None:
    """Write the weights to an empty file, to the disk as well. Raises OSError: no room, or a limit."""
    header, tensors, size = _header_of(weights, key)
    pieces, content = _Pieces(file), hashlib.sha256()
    pieces.put(bytes(_PREFIX.size) + header)
    done = _PREFIX.size + len(header)

    def put(data: memoryview) -> None:
        content.update(data)
        pieces.put(data)

    for tensor, start in tensors:
        put(memoryview(bytes(start - done)))
        put(_view(tensor))
        done = start + tensor.nbytes
        progress(done / size, "writing the packed weights for the next start")
    put(memoryview(bytes(size - done)))
    pieces.end()
    file.seek(0)
    _write_all(file, _prefix(header, content.digest()))
    os.fsync(file.fileno())


class _Pieces:
    """Write an unbuffered file in whole pieces: a smaller one would make the file system take small pages for it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._piece, self._filled = file, memoryview(bytearray(_CHUNK)), 0

    def put(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            count = min(len(left), len(self._piece) - self._filled)
            self._piece[self._filled : self._filled + count] = left[:count]
            self._filled, left = self._filled + count, left[count:]
            if self._filled == len(self._piece):
                self.end()

    def end(self) -> None:
        """Write what has come since the last piece."""
        _write_all(self._file, self._piece[: self._filled])
        self._filled = 0


def _header_of(weights: PackedWeights, key: str) -> tuple[bytes, list[tuple[Tensor, int]], int]:
    """Return the header, the tensors with their offsets in the file, and the file's size."""
    tree = _Tree()
    root = tree.of(weights)
    lengths = [tensor.nbytes for tensor in tree.tensors]
    described = [[_NAMES[tensor.dtype], list(tensor.shape)] for tensor in tree.tensors]
    # Offsets count from the end of the header, rounded up, so that they do not depend on its length.
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += _rounded(length, _ALIGNMENT)
    content = {"key": key, "tree": root, "tensors": [[*each, start] for each, start in zip(described, starts, strict=True)]}
    header = json.dumps(content, separators=(",", ":")).encode()
    first = _rounded(_PREFIX.size + len(header), _ALIGNMENT)
    placed = [(tensor, first + start) for tensor, start in zip(tree.tensors, starts, strict=True)]
    return header, placed, _rounded(first + end, huge_pages.HUGE_PAGE)


def num_bytes(weights: PackedWeights) -> int:
    """Return the size of the file of these weights."""
    return _header_of(weights, "0" * 64)[2]


def _prefix(header: bytes, content: bytes) -> bytes:
    before = _MAGIC + len(header).to_bytes(8, "little") + content
    return before + hashlib.sha256(before + header).digest()


def _write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _view(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy().data) if flat.numel() else memoryview(b"")


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# Reading


@dataclass(frozen=True)
class OpenedWeights:
    """`is_shared`: the weights are pages of the file, shared with every process that maps it; else a copy of this process.
    `found` is the file's stat."""

    weights: PackedWeights
    is_shared: bool
    found: os.stat_result


def read(
    path: Path,
    key: str,
    config: ModelConfig,
    *,
    is_known: Callable[[os.stat_result], bool],
    copies: bool = True,
    shares_small: bool = False,
) -> OpenedWeights:
    """Return the weights in the file. `is_known` says whether the file with this stat was found whole before; its content is
    hashed otherwise. `shares_small`: the file is mapped also where its pages are small. Raises UnusableFile; NotShared where only
    a copy would do and `copies` is false; OSError for a file that is not there or cannot be read."""
    with path.open("rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        _check_owner(path, found)
        header = _checked_header(file, path, found.st_size, key)
        if not is_known(found) and _hash_behind(file, header.end) != header.content:
            raise UnusableFile(f"{path} is damaged: its content does not have its hash")
        memory, is_shared = _memory_of(file, found.st_size, copies=copies, shares_small=shares_small)
    start = _rounded(header.end, _ALIGNMENT)
    tensors = [_tensor(memory, start + offset, name, shape) for name, shape, offset in header.tensors]
    try:
        weights = _built(header.tree, tensors, config)
    except (LookupError, TypeError, ValueError) as error:
        raise UnusableFile(f"{path} holds other parts than this version's weights have ({error})") from error
    if not isinstance(weights, PackedWeights):
        raise UnusableFile(f"{path} holds no weights")
    mapped_bytes = found.st_size if is_shared else 0
    return OpenedWeights(replace(weights, mapped_bytes=mapped_bytes, file=(str(path), key)), is_shared, found)


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of weights in memory, and at which byte of their file its content begins."""

    tensor: Tensor
    offset: int


def placed(file: BinaryIO, path: Path, weights: PackedWeights, key: str) -> list[PlacedTensor]:
    """Return the tensors of `weights` that the file holds, of which the weights were read or which was written of them. Raises
    UnusableFile for one that is not theirs."""
    header = _checked_header(file, path, os.fstat(file.fileno()).st_size, key)
    start, found = _rounded(header.end, _ALIGNMENT), []
    for tensor, number in _pairs(header.tree, weights):
        name, shape, offset = header.tensors[number]
        if (_NAMES.get(tensor.dtype), list(tensor.shape)) != (name, shape):
            raise UnusableFile(f"{path} holds {shape} of {name} where the weights have {list(tensor.shape)} of {tensor.dtype}")
        found.append(PlacedTensor(tensor, start + offset))
    return found


def _pairs(node: object, value: object) -> Iterator[tuple[Tensor, int]]:
    """Yield the tensors of both trees, with their numbers in the file. What was added to the weights since has none."""
    if not isinstance(node, dict):
        return
    ((kind, content),) = node.items()
    if kind == "tensor":
        if isinstance(value, Tensor):
            yield value, content
    elif kind in ("list", "tuple"):
        if isinstance(value, list | tuple) and len(value) == len(content):
            for each, part in zip(content, value, strict=True):
                yield from _pairs(each, part)
    elif kind in _TYPES:
        for name, each in content.items():
            yield from _pairs(each, getattr(value, name, None))


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Raise UnusableFile for a file that another user could have written: who can write weights can compute their seal, too."""
    if found.st_uid not in (0, os.geteuid()):
        raise UnusableFile(f"{path} belongs to user {found.st_uid}, neither to root nor to user {os.geteuid()} of this process")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusableFile(f"{path} can be written by other users; take that from them (chmod go-w)")


@dataclass(frozen=True)
class _Header:
    """`end` is where it ends in the file, `content` the hash of what follows; a tensor is its dtype, shape and offset."""

    tree: object
    tensors: list[tuple[str, list[int], int]]
    end: int
    content: bytes


def _checked_header(file: BinaryIO, path: Path, size: int, key: str) -> _Header:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise UnusableFile(f"{path} is no file of packed weights, or another version's")
    _magic, length, content, _seal = _PREFIX.unpack(prefix)
    if length > min(size, _MAX_HEADER):
        raise UnusableFile(f"{path} is cut off or damaged: {size} bytes, and its header has {length}")
    header = file.read(length)
    if _prefix(header, content) != prefix:
        raise UnusableFile(f"{path} is damaged: its header does not have its seal")
    described = json.loads(header)
    if described["key"] != key:
        raise UnusableFile(f"{path} holds the weights of another model, format or version")
    start = _rounded(_PREFIX.size + length, _ALIGNMENT)
    end = max((start + offset + _length(name, shape) for name, shape, offset in described["tensors"]), default=start)
    if size != _rounded(end, huge_pages.HUGE_PAGE):
        raise UnusableFile(f"{path} is cut off: {size} bytes in place of {_rounded(end, huge_pages.HUGE_PAGE)}")
    return _Header(described["tree"], described["tensors"], _PREFIX.size + length, content)


def _length(name: str, shape: list[int]) -> int:
    return math.prod(shape) * _DTYPES[name].itemsize


def _tensor(memory: Tensor, start: int, name: str, shape: list[int]) -> Tensor:
    part = memory[start : start + _length(name, shape)]
    return part.view(_DTYPES[name]).view(shape)


def _hash_behind(file: BinaryIO, first: int) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    file.seek(first)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # an unbuffered file has it
        digest.update(buffer[:count])
    return digest.digest()


# The file's memory: mapped where large pages can be had, or shared ones are wanted; else copied into large pages of this process
#
# Weights in pages of 4 KiB miss the TLB 512 times as often: a decode step takes 5 to 8 % longer with all of them in such pages
# (docs/cpu.md). A copy is read at full speed, but it is not shared, and where memory is full of cached files the system needs
# seconds for each GB of large pages.


def _memory_of(file: BinaryIO, size: int, *, copies: bool, shares_small: bool) -> tuple[Tensor, bool]:
    """Return the file's bytes, [size] uint8, and whether they are its pages."""
    with contextlib.suppress(OSError):
        memory, is_large = _mapped(file, size)
        if is_large or shares_small or not HUGE_PAGES.is_there:  # a copy would not be in large pages either
            return memory, True
        del memory
    if not copies:
        raise NotShared
    return _copied(file, size), False


def _mapped(file: BinaryIO, size: int) -> tuple[Tensor, bool]:
    """Return the file's bytes, [size] uint8, mapped but not to be written to, and whether in large pages. Raises OSError."""
    if not HUGE_PAGES.is_taken:  # not `is_there`: files can have large pages where private memory has none
        try:
            view, is_large = huge_pages.map_file(file.fileno(), size)
            return torch.frombuffer(view, dtype=torch.uint8), is_large
        except OSError as error:
            if error.errno in (errno.EIO, errno.EFAULT):  # a step would end the process that reads there
                raise UnusableFile(f"the file cannot be read ({error.strerror})") from error
    # Private, so that it counts as writable, which torch wants; its pages are shared all the same, as nothing writes to them.
    return torch.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=torch.uint8), False


def _copied(file: BinaryIO, size: int) -> Tensor:
    memory = allocate(size)
    view, done = memoryview(memory.numpy().data), 0
    file.seek(0)
    while done < size:
        count = file.readinto(view[done : done + _CHUNK])  # type: ignore[attr-defined]  # an unbuffered file has it
        if not count:
            raise UnusableFile(f"it ended at byte {done} while it was read")
        done += count
    return memory
