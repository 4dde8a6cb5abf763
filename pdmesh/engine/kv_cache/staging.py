"""Staging between a KV pool on a device and host memory that transports read and write: a bounded number of pieces.

    take ─► piece ─► fetch: pool ─ gather ─► room ─ copy ─► piece       give_back: when it is not used any more
                     store: pool ◄─ scatter ─ room ◄─ copy ─ piece      while a copy is under way it cannot be given back

copies.py copies pieces. Nothing here waits: a caller that has to know when a piece is filled or read uses the returned future.
One thread calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.kv_cache.block_moves import BlockCopies
from pdmesh.engine.kv_cache.copies import Copies, Piece, PieceCopies
from pdmesh.engine.kv_cache.streams import Mark, Streams


@dataclass(frozen=True)
class StagingSizes:
    """Size one direction. The host gives num_pieces * piece_bytes, the device one piece."""

    num_pieces: int = 8
    piece_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in ("num_pieces", "piece_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")


class Staging:
    """Manage the pieces of one direction of one pool."""

    def __init__(
        self,
        pool: Tensor | int,
        streams: Streams,
        sizes: StagingSizes,
        block_copies: BlockCopies | None = None,
        copies: Copies | None = None,
    ) -> None:
        """pool: `KVPool.tensor`. `copies` fills the pieces, where other processes take part
        (pdmesh/engine/parallel/staging.py), or where the pool is another's, of which `pool` is then the number of blocks. Raises
        ValueError for pieces too small for one block of a layer."""
        self.sizes = sizes
        self._copies = copies or _copies_of(pool, streams, sizes, block_copies)
        self._num_blocks = pool if isinstance(pool, int) else pool.shape[2]
        self._free = [self._copies.new_piece(index) for index in range(sizes.num_pieces)]
        self._taken: set[Piece] = set()

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block's keys, or values, in a layer."""
        return self._copies.block_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Piece | None:
        """Return a free piece; None: all are lent."""
        if not self._free:
            return None
        piece = self._free.pop()
        self._taken.add(piece)
        return piece

    def give_back(self, piece: Piece) -> None:
        """Take the piece back. Raises IntegrityError for one that was not taken, or that the device still reads or writes."""
        if piece not in self._taken or piece.is_under_way:
            raise IntegrityError("a piece is given back that was not taken, or while it is copied")
        self._taken.remove(piece)
        self._free.append(piece)
        self.check()

    def fetch(self, piece: Piece, layers: range, block_ids: Sequence[int], after: Mark) -> Future[None]:
        """Fill the piece with these blocks of these layers, as they are at `after`, in wire order (kvtransfer/manifest.py)."""
        self._prepare(piece, layers, block_ids)
        piece.copy = self._copies.fetch(piece, layers, len(block_ids), after)
        return piece.copy

    def store(self, piece: Piece, layers: range, block_ids: Sequence[int], after: Mark) -> Future[None]:
        """Write what the piece holds into these blocks; behind `after` nothing else writes to them."""
        self._prepare(piece, layers, block_ids)
        piece.copy = self._copies.store(piece, layers, len(block_ids), after)
        return piece.copy

    def warm(self) -> None:
        """Compile the kernels, by copying a block out of the pool and back. Waits; call it before the pool is used."""
        piece = self.take()
        if piece is None:
            raise IntegrityError("pieces are lent already")
        for move in (self.fetch, self.store):
            move(piece, range(1), [0], self._copies.mark()).result()
        self.give_back(piece)

    def check(self) -> None:
        """Raise IntegrityError unless free + taken == all."""
        if len(self._free) + len(self._taken) != self.sizes.num_pieces:
            raise IntegrityError(f"{len(self._free)} free + {len(self._taken)} taken pieces are not {self.sizes.num_pieces}")

    def close(self) -> None:
        """Wait for copies that are under way; idempotent."""
        self._copies.close()

    def num_bytes(self, layers: range, num_blocks: int) -> int:
        return len(layers) * 2 * num_blocks * self.block_bytes

    def _prepare(self, piece: Piece, layers: range, block_ids: Sequence[int]) -> None:
        """Check the piece and copy its block ids. Raises IntegrityError, ValueError."""
        if piece not in self._taken or piece.is_under_way:
            raise IntegrityError("a piece is used that was not taken, or while it is copied")
        size = self.num_bytes(layers, len(block_ids))
        if not 0 < size <= self.sizes.piece_bytes:
            raise ValueError(
                f"block_ids: {len(block_ids)} of {len(layers)} layers are {size} bytes, a piece has {self.sizes.piece_bytes}"
            )
        if not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise ValueError(f"block_ids: {min(block_ids)} to {max(block_ids)}; the pool has 0 to {self._num_blocks - 1}")
        piece.block_ids[: len(block_ids)] = torch.tensor(block_ids, dtype=torch.int32)


def _copies_of(pool: Tensor | int, streams: Streams, sizes: StagingSizes, block_copies: BlockCopies | None) -> Copies:
    if isinstance(pool, int):
        raise ValueError("pool: a number of blocks goes with copies; give the tensor")
    return PieceCopies(pool, streams, sizes.piece_bytes, block_copies)


@dataclass(frozen=True)
class StepMarks:
    """Marks of the step that runs, as far as it has been launched."""

    step: Sequence[tuple[int, Mark]]

    def behind(self, num_layers: int) -> Mark:
        """Return the first mark behind the first `num_layers` layers. If the step has not come so far, an earlier step was meant,
        and the step's beginning is behind that one."""
        return next((mark for reached, mark in self.step if reached >= num_layers), self.step[0][1])


class Marks:
    """Record behind which mark of the compute stream the keys and values of which layers are written.

        the engine thread, as it launches a step:    begin()   ...   reach(4)   ...   reach(8)   ...
                                                    ▲ all of earlier steps    ▲ layers 0 to 3 of this one

    `so_far` may be called from another thread about layers of `begin` and `reach`, as a step reported them (events.py).
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._step = [(0, self.now())]

    def begin(self) -> None:
        self._step = [(0, self.now())]

    def reach(self, num_layers: int) -> None:
        self._step.append((num_layers, self._within(num_layers)))

    def so_far(self) -> StepMarks:
        return StepMarks(tuple(self._step))

    def behind(self, num_layers: int) -> Mark:
        """Return the mark by what is known now; see StepMarks."""
        return self.so_far().behind(num_layers)

    def now(self) -> Mark:
        """Return a mark behind all that has been launched."""
        return self._streams.mark()

    def reached(self, mark: Mark) -> Future[None]:
        """Return a future that is done when the device has passed the mark."""
        return self._streams.reached(mark)

    def close(self) -> None:
        """Close the streams, when no mark is waited for any more; idempotent."""
        self._streams.close()

    def _within(self, num_layers: int) -> Mark:
        """Return the mark behind so many layers of the step that is being launched."""
        return self._streams.mark()
