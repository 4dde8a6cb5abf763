"""Copies between KV blocks on a device and contiguous pieces in host memory, by kernels on the pool's device and its copy engine.

    piece [len(layers), 2, tokens, heads, head_dim]: token t of it is token first_token + t of the blocks, in their order

A piece of whole blocks with all heads is a part in wire order (kvtransfer/manifest.py): per layer all keys, then all values.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.support import why_not_here
from pdmesh.engine.kv_cache.block_moves import BlockCopies, Move
from pdmesh.engine.kv_cache.cuda_ipc import Driver
from pdmesh.engine.kv_cache.streams import Mark, Streams


class IndexedBlocks:
    """Copy by torch's indexing: the reference, and the implementation without Triton."""

    def gather(self, move: Move) -> None:
        movable(move.piece).copy_(_flat(move)[:, :, move.slots])

    def scatter(self, move: Move) -> None:
        _flat(move)[:, :, move.slots] = movable(move.piece)


def block_copies_for(device: torch.device) -> BlockCopies:
    """Return Triton's where it runs, else torch's."""
    if why_not_here(device.type):
        return IndexedBlocks()
    from pdmesh.engine.kernels.triton.blocks import TritonBlocks

    return TritonBlocks()


def _flat(move: Move) -> Tensor:
    """Return [layers, 2, slots, heads, head_dim], a view of what the move copies."""
    heads = move.check()
    return movable(move.pool)[move.layers.start : move.layers.stop, :, :, :, heads.start : heads.stop].flatten(2, 3)


def movable(numbers: Tensor) -> Tensor:
    """Return the same memory as a dtype that torch's indexing takes on every device: float8 as bytes."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers


# Rows of bytes between room on a device and host memory in which they are strided
#
#     room [rows, n], contiguous        host [rows, n], n bytes of each row_bytes: the bytes beside them are other ranks', and
# stay
#
# torch would make such a copy through a temporary, and wait for it: it keeps `non_blocking` for contiguous memory alone.
# So on CUDA it is one call of the driver, for the copy engine, on the current stream.


_HOST, _DEVICE = 1, 2  # CUmemorytype


def copy_rows(target: Tensor, source: Tensor) -> None:
    """Copy [rows, n] uint8, both with n contiguous. Between a device and the host, which has to be pinned, the copy is launched
    and not waited for. Raises CudaError."""
    if target.device == source.device or (target.is_contiguous() and source.is_contiguous()):
        target.copy_(source, non_blocking=True)
    else:
        _launch(target, source)


class _Place(ctypes.Structure):
    """One end of the copy, half of the driver's description."""

    _fields_ = [
        ("first_byte", ctypes.c_size_t),
        ("first_row", ctypes.c_size_t),
        ("memory_type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    ]

    @classmethod
    def of(cls, rows: Tensor) -> _Place:
        if rows.device.type == "cuda":
            return cls(memory_type=_DEVICE, device=rows.data_ptr(), pitch=rows.stride(0))
        return cls(memory_type=_HOST, host=rows.data_ptr(), pitch=rows.stride(0))


class RowsCopy(ctypes.Structure):
    """Mirror CUDA_MEMCPY2D of cuda.h."""

    _fields_ = [("source", _Place), ("target", _Place), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]

    @classmethod
    def of(cls, target: Tensor, source: Tensor) -> RowsCopy:
        return cls(source=_Place.of(source), target=_Place.of(target), width=target.shape[1], height=target.shape[0])


def _launch(target: Tensor, source: Tensor) -> None:
    device = target.device if target.device.type == "cuda" else source.device
    driver, stream = _driver_of(device), torch.cuda.current_stream(device).cuda_stream
    with driver.current():
        driver.call("cuMemcpy2DAsync_v2", ctypes.byref(RowsCopy.of(target, source)), ctypes.c_void_p(stream))


@cache
def _driver_of(device: torch.device) -> Driver:
    return Driver(torch.cuda.current_device() if device.index is None else device.index)


# Keys and values of blocks between a pool and pieces of host memory, through room on the pool's device
#
#     pool ─ gather ─► room [rows, our bytes] ─ copy ─► piece [rows, all heads' bytes]       back: copy, then scatter
#                                                       a row: keys, or values, of a token in a layer
#
# A piece is in wire order (kvtransfer/manifest.py), with all heads. A pool may have some of them
# (pdmesh/engine/parallel/): then only its bytes of each row are copied, beside those of other ranks. The lane works in order,
# so one room is enough.


@dataclass(eq=False)
class Piece:
    index: int  # index among the pieces of its direction
    host: Tensor  # [piece_bytes] uint8
    block_ids: Tensor  # [most blocks] int32, in the host's memory too
    copy: Future[None] | None = field(default=None)  # the last copy

    @property
    def is_under_way(self) -> bool:
        return self.copy is not None and not self.copy.done()

    def view(self, num_bytes: int) -> memoryview:
        """Return a writable view; release it before the piece is given back."""
        return memoryview(self.host.numpy())[:num_bytes]  # type: ignore[arg-type]


class Copies(Protocol):
    """Copy pieces of one direction. Nothing here waits."""

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block's keys, or values, in a layer, with all heads."""
        ...

    def mark(self) -> Mark:
        """Return a mark behind all that has been launched."""
        ...

    def new_piece(self, index: int) -> Piece: ...

    def fetch(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        """Copy the first `num_blocks` of `piece.block_ids`, as they are at `after`, into the piece."""
        ...

    def store(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        """Copy the piece into the blocks, behind `after`."""
        ...

    def close(self) -> None:
        """Wait for copies that are under way; idempotent."""
        ...


@dataclass(frozen=True)
class Columns:
    """Describe which bytes of a piece's rows are those of a pool's heads."""

    row_bytes: int
    first: int
    num_bytes: int

    @classmethod
    def of(cls, pool: Tensor, rank: int = 0, size: int = 1) -> Columns:
        """Return the columns of `pool` [..., heads, head_dim], one of `size` ranks with as many heads each."""
        own = pool.shape[4] * pool.shape[5] * pool.element_size()
        return cls(size * own, rank * own, own)


@dataclass(frozen=True)
class PieceSize:
    """Hold the size of a piece, in bytes and in blocks of one layer."""

    num_bytes: int
    max_blocks: int

    @classmethod
    def of(cls, piece_bytes: int, block_bytes: int) -> PieceSize:
        """Return the size. Raises ValueError for a piece too small for one block of a layer."""
        max_blocks = piece_bytes // (2 * block_bytes)
        if not max_blocks:
            raise ValueError(f"piece_bytes: {piece_bytes} are too few for keys and values of a block: {2 * block_bytes}")
        return cls(piece_bytes, max_blocks)


class DevicePieces:
    """Hold what copies of pieces need on a device, whatever the pool there looks like: a lane, and room for the blocks' ids."""

    def __init__(self, streams: Streams, size: PieceSize, device: torch.device) -> None:
        self._size, self._streams, self._lane = size, streams, streams.lane()
        self._room_ids = torch.empty(size.max_blocks, dtype=torch.int32, device=device)

    def mark(self) -> Mark:
        return self._streams.mark()

    def new_piece(self, index: int) -> Piece:
        host_room = self._streams.host_room
        return Piece(index, host_room(self._size.num_bytes), host_room(4 * self._size.max_blocks).view(torch.int32))

    def close(self) -> None:
        self._lane.close()

    def _ids(self, piece: Piece, num_blocks: int) -> Tensor:
        """Return the ids on the device, within the lane's work."""
        ids = self._room_ids[:num_blocks]
        ids.copy_(piece.block_ids[:num_blocks], non_blocking=True)
        return ids


class PieceCopies(DevicePieces):
    """Copy pieces of one pool. Satisfies Copies."""

    def __init__(
        self,
        pool: Tensor,
        streams: Streams,
        piece_bytes: int,
        copies: BlockCopies | None = None,
        columns: Columns | None = None,
    ) -> None:
        """pool: `KVPool.tensor`. Raises ValueError, see PieceSize."""
        self._columns = Columns.of(pool) if columns is None else columns
        self.block_bytes = pool.shape[3] * self._columns.row_bytes
        super().__init__(streams, PieceSize.of(piece_bytes, self.block_bytes), pool.device)
        self._pool = pool
        self._copies = block_copies_for(pool.device) if copies is None else copies
        rows = piece_bytes // self._columns.row_bytes
        self._room = torch.empty((rows, self._columns.num_bytes), dtype=torch.uint8, device=pool.device)

    def fetch(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        room, host = self._rows(piece, layers, num_blocks)

        def work() -> None:
            self._copies.gather(self._move(piece, layers, num_blocks, room))
            copy_rows(host, room)

        return self._lane.run(work, after)

    def store(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        room, host = self._rows(piece, layers, num_blocks)

        def work() -> None:
            copy_rows(room, host)
            self._copies.scatter(self._move(piece, layers, num_blocks, room))

        return self._lane.run(work, after)

    def _rows(self, piece: Piece, layers: range, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return both as [rows, our bytes]: the room, and the piece."""
        columns = self._columns
        num_rows = len(layers) * 2 * num_blocks * self._pool.shape[3]
        rows = piece.host[: num_rows * columns.row_bytes].view(num_rows, columns.row_bytes)
        return self._room[:num_rows], rows[:, columns.first : columns.first + columns.num_bytes]

    def _move(self, piece: Piece, layers: range, num_blocks: int, room: Tensor) -> Move:
        """Return the move, within the lane's work: the ids are copied first."""
        ids = self._ids(piece, num_blocks)
        shaped = room.view(-1).view(self._pool.dtype).view(len(layers), 2, -1, *self._pool.shape[4:])
        return Move(self._pool, layers, ids, shaped)
