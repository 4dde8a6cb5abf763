"""Keys and values of blocks between a pool and pieces of the host's memory, by way of room on the pool's device.

    pool ─ gather ─► room [rows, our bytes] ─ copy ─► piece [rows, all heads' bytes]       back: copy, then scatter
                                                      a row: keys, or values, of a token in a layer

A piece is filled as a part travels (kvtransfer/parts.py), with all heads. A pool may have some of them (engine/parallel/): then
its bytes of each row come and go, and other ranks' lie beside them. The lane works in order, so one room is enough.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.copies import BlockCopies, Move, block_copies_for
from pdmesh.engine.kv_cache.row_copies import copy_rows
from pdmesh.engine.kv_cache.streams import Mark, Streams


@dataclass(eq=False)
class Piece:
    index: int  # among those of its direction
    host: Tensor  # [piece_bytes] uint8
    block_ids: Tensor  # [most blocks] int32, in the host's memory too
    copy: Future[None] | None = field(default=None)  # the last one

    @property
    def is_under_way(self) -> bool:
        return self.copy is not None and not self.copy.done()

    def view(self, num_bytes: int) -> memoryview:
        """Writable; to be released before the piece is given back."""
        return memoryview(self.host.numpy())[:num_bytes]  # type: ignore[arg-type]


class Copies(Protocol):
    """Of one direction: what a piece is filled from and emptied into. Nothing here waits."""

    @property
    def block_bytes(self) -> int:
        """Of a block's keys, or values, in a layer, with all heads."""
        ...

    def mark(self) -> Mark:
        """Behind all that has been launched."""
        ...

    def new_piece(self, index: int) -> Piece: ...

    def fetch(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        """The first `num_blocks` of `piece.block_ids`, as they are at `after`, into the piece."""
        ...

    def store(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        """Back, behind `after`."""
        ...

    def close(self) -> None:
        """Waits for copies that are under way; idempotent."""
        ...


@dataclass(frozen=True)
class Columns:
    """Which bytes of a piece's rows are those of a pool's heads."""

    row_bytes: int
    first: int
    num_bytes: int

    @classmethod
    def of(cls, pool: Tensor, rank: int = 0, size: int = 1) -> Columns:
        """`pool` [..., heads, head_dim]: of `size` ranks with as many heads each."""
        own = pool.shape[4] * pool.shape[5] * pool.element_size()
        return cls(size * own, rank * own, own)


@dataclass(frozen=True)
class PieceSize:
    """Of a piece, in bytes and in blocks of one layer."""

    num_bytes: int
    max_blocks: int

    @classmethod
    def of(cls, piece_bytes: int, block_bytes: int) -> PieceSize:
        """Raises ValueError for a piece too small for one block of a layer."""
        max_blocks = piece_bytes // (2 * block_bytes)
        if not max_blocks:
            raise ValueError(f"piece_bytes: {piece_bytes} are too few for keys and values of a block: {2 * block_bytes}")
        return cls(piece_bytes, max_blocks)


class PieceCopies:
    """Of one pool. Satisfies Copies."""

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
        self._size = PieceSize.of(piece_bytes, self.block_bytes)
        self._pool = pool
        self._copies = block_copies_for(pool.device) if copies is None else copies
        self._streams, self._lane = streams, streams.lane()
        rows = piece_bytes // self._columns.row_bytes
        self._room = torch.empty((rows, self._columns.num_bytes), dtype=torch.uint8, device=pool.device)
        self._room_ids = torch.empty(self._size.max_blocks, dtype=torch.int32, device=pool.device)

    def mark(self) -> Mark:
        return self._streams.mark()

    def new_piece(self, index: int) -> Piece:
        host_room = self._streams.host_room
        return Piece(index, host_room(self._size.num_bytes), host_room(4 * self._size.max_blocks).view(torch.int32))

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

    def close(self) -> None:
        self._lane.close()

    def _rows(self, piece: Piece, layers: range, num_blocks: int) -> tuple[Tensor, Tensor]:
        """[rows, our bytes], both: of the room, and of the piece."""
        columns = self._columns
        num_rows = len(layers) * 2 * num_blocks * self._pool.shape[3]
        rows = piece.host[: num_rows * columns.row_bytes].view(num_rows, columns.row_bytes)
        return self._room[:num_rows], rows[:, columns.first : columns.first + columns.num_bytes]

    def _move(self, piece: Piece, layers: range, num_blocks: int, room: Tensor) -> Move:
        """Within the lane's work: the ids go first."""
        ids = self._room_ids[:num_blocks]
        ids.copy_(piece.block_ids[:num_blocks], non_blocking=True)
        shaped = room.view(-1).view(self._pool.dtype).view(len(layers), 2, -1, *self._pool.shape[4:])
        return Move(self._pool, layers, ids, shaped)
