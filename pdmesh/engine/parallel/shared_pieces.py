"""Pieces of one direction in host memory that every rank maps, so that each copies its heads of a part to their place.

[ piece 0 | its block ids | piece 1 | its block ids | ... ]        each begins a page
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.copies import Piece, PieceSize

_PORTABLE = 1  # cudaHostRegisterPortable


@dataclass(frozen=True)
class PiecesShape:
    """Describe the pieces to the other ranks."""

    num_pieces: int
    piece_bytes: int
    block_bytes: int  # keys, or values, of a block in a layer, with all heads

    @property
    def size(self) -> PieceSize:
        return PieceSize.of(self.piece_bytes, self.block_bytes)

    @property
    def stride(self) -> int:
        return _in_pages(self.piece_bytes) + _in_pages(4 * self.size.max_blocks)

    @property
    def num_bytes(self) -> int:
        return self.num_pieces * self.stride


class SharedPieces:
    """Map the pieces in one rank."""

    def __init__(self, shape: PiecesShape, memory: mmap.mmap, device: torch.device) -> None:
        """Pin the memory for the device. Raises RuntimeError when the system does not allow it."""
        self._shape = shape
        self._whole: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._is_pinned = device.type == "cuda"
        if self._is_pinned and (code := _register(self._whole)):
            raise RuntimeError(f"{shape.num_bytes} bytes of the host's memory cannot be pinned: CUDA error {code}")

    def piece(self, index: int) -> Piece:
        begin, size = index * self._shape.stride, self._shape.size
        ids = begin + _in_pages(size.num_bytes)
        block_ids = self._whole[ids : ids + 4 * size.max_blocks].view(torch.int32)
        return Piece(index, self._whole[begin : begin + size.num_bytes], block_ids)

    def close(self) -> None:
        """Unpin the memory; idempotent. No copy may be under way. It is unmapped with the last of its pieces."""
        if self._is_pinned:
            self._is_pinned = False
            _runtime().cudaHostUnregister(self._whole.data_ptr())


def _register(memory: Tensor) -> int:
    return int(_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
