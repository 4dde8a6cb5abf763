"""The hand-off in and out of pools that each rank has: all ranks fill and empty the pieces of a Staging together.

order ─► rank 0: gather heads 0 and 1 ─┐
      ─► rank 1: gather heads 2 and 3 ─┴► [ token: head 0 | 1 | 2 | 3 ]   a shared piece, as transports send it
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from pdmesh.engine.kv_cache.copies import Columns, Piece, PieceCopies
from pdmesh.engine.kv_cache.pool import shared_memory
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import Mark, Streams
from pdmesh.engine.parallel.copies import Copy, CopyChannel
from pdmesh.engine.parallel.events import GroupEvent, GroupEvents
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.parallel.shared_pieces import PiecesShape, SharedPieces


class RanksCopies:
    """Copy pieces of one direction on all ranks. Satisfies pdmesh.engine.kv_cache.copies.Copies; marks are GroupEvents'."""

    def __init__(self, own: PieceCopies, pieces: SharedPieces, channel: CopyChannel, marks: GroupEvents) -> None:
        self._own, self._pieces, self._channel, self._marks = own, pieces, channel, marks

    @property
    def block_bytes(self) -> int:
        return self._own.block_bytes

    def mark(self) -> Mark:
        return self._marks.now()

    def new_piece(self, index: int) -> Piece:
        return self._pieces.piece(index)

    def fetch(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        assert isinstance(after, GroupEvent), "a mark of other streams"
        own = partial(self._own.fetch, piece, layers, num_blocks, after.own)
        return self._channel.run(Copy(False, piece.index, layers, num_blocks, after.place), own)

    def store(self, piece: Piece, layers: range, num_blocks: int, after: Mark) -> Future[None]:
        assert isinstance(after, GroupEvent), "a mark of other streams"
        own = partial(self._own.store, piece, layers, num_blocks, after.own)
        return self._channel.run(Copy(True, piece.index, layers, num_blocks, after.place), own)

    def close(self) -> None:
        self._channel.close()
        self._own.close()
        self._pieces.close()


def stage_ranks(
    model: ParallelModel, pool: Tensor, streams: Streams, sizes: Sequence[StagingSizes]
) -> tuple[Marks, list[Staging]]:
    """Return a Staging for each of `sizes`. pool: rank 0's; streams: its device's. Call it before the first step, on one thread.

    Raises ValueError for pieces too small for a block of a layer, RankFailed."""
    marks = GroupEvents(streams, model.commands)
    columns = Columns.of(pool, model.shard.rank, model.shard.size)
    stagings = []
    for each in sizes:
        own = PieceCopies(pool, streams, each.piece_bytes, columns=columns)
        shape = PiecesShape(each.num_pieces, each.piece_bytes, own.block_bytes)
        pieces, channel = _shared_with(model, shape, pool)
        stagings.append(Staging(pool, streams, each, copies=RanksCopies(own, pieces, channel, marks)))
    return marks, stagings


def _shared_with(model: ParallelModel, shape: PiecesShape, pool: Tensor) -> tuple[SharedPieces, CopyChannel]:
    channels: list[CopyChannel] = []
    memory, fd = shared_memory("pdmesh-pieces", shape.num_bytes, lambda fd: channels.append(model.open_copies(shape, fd)))
    if fd is not None:
        os.close(fd)  # all ranks have it, and no other process gets it
    return SharedPieces(shape, memory, pool.device), channels[0]
