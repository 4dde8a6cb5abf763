"""KV in memory that no transport can read: parts leave and arrive through pinned pieces
(pdmesh/engine/kv_cache/staging.py).

    send      `fetch` lends a piece filled with a part; `give_back` when it is sent. A caller that finds no piece waits in turn.
              The next part is prefetched where pieces are free (kvtransfer/sender/send_queue.py)
    receive   a part arrives in ordinary memory and is verified there; `place` then writes it to the pool

Everything runs on the event loop. A caller that is cancelled returns only when the device has finished, so nothing reads or
writes a block that its owner has freed. Arriving parts have pieces of their own and wait for no peer while they hold one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from kvtransfer.conversion import Bytes, Conversion
from kvtransfer.conversion import Staging as HostStaging
from kvtransfer.manifest import KVMemory, Part, PoolShape, cut
from kvtransfer.stream import Stream, all_settled, settled

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.copies import Piece
    from pdmesh.engine.kv_cache.ipc_pool import ShownPool
    from pdmesh.engine.kv_cache.staging import Marks, Staging
    from pdmesh.engine.kv_cache.streams import Mark

T = TypeVar("T")


# How pushes get the pieces of one direction: in turn, or ahead of their turn while no other push needs the piece
#
#     needed    `take`: first come, first served. Where no piece is free, a holder that is ahead of its turn is preempted
#     ahead     `take_spare`: a free piece that no other push waits for, or None. It never waits
#
# So a push that has to send a part now waits only for parts that are being sent, never for prefetched parts of slow receivers.
# A push never waits for a piece while it holds one.


@dataclass(frozen=True)
class FilledPiece:
    """Hold a piece and a view of the part in it."""

    piece: Piece
    view: memoryview


class PreemptibleHolder(Protocol):
    """Hold a piece ahead of its turn."""

    def preempt(self) -> None:
        """Give the piece back: at once, or when its copy has ended."""


class PieceAllocator:
    """Hand out the pieces of one direction."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self._places = asyncio.Semaphore(staging.sizes.num_pieces)
        self._ahead: deque[PreemptibleHolder] = deque()  # the first one has waited longest for its turn, so its receiver is slow

    async def take(self) -> Piece:
        if self._places.locked() and self._ahead:
            self._ahead.popleft().preempt()
        await self._places.acquire()
        return self._taken()

    async def take_spare(self, holder: PreemptibleHolder) -> Piece | None:
        """Return a free piece, or None. Until `keep` the holder may be preempted."""
        if self._places.locked():  # true also while another caller waits
            return None
        await self._places.acquire()
        self._ahead.append(holder)
        return self._taken()

    def keep(self, holder: PreemptibleHolder) -> None:
        """Protect the holder's piece, if it still has one, from preemption; idempotent."""
        with suppress(ValueError):
            self._ahead.remove(holder)

    def give_back(self, piece: Piece) -> None:
        self.staging.give_back(piece)
        self._places.release()

    def give_back_behind(self, piece: Piece) -> None:
        """Give the piece back when its last copy has ended."""
        if not piece.is_under_way or piece.copy is None:
            self.give_back(piece)
        else:
            asyncio.wrap_future(piece.copy).add_done_callback(lambda done: self._given_back(piece, done))

    def _given_back(self, piece: Piece, done: asyncio.Future[None]) -> None:
        done.exception()  # retrieved: the waiter of the copy gets the error
        self.give_back(piece)

    def _taken(self) -> Piece:
        piece = self.staging.take()
        assert piece is not None, "the semaphore counts the free pieces"
        return piece


class Interruptible(Protocol):
    """Run functions in a thread, until it is interrupted: a `Stream`, or a tier's threads."""

    async def run(self, work: Callable[..., T], *args: object) -> T: ...

    def check_interrupted(self) -> None:
        """Raise PeerClosed when it was interrupted."""


class StagedMemory:
    """Present a pool's KV to transfers through pinned pieces. Satisfies KVMemory, but its bytes cannot be viewed."""

    fd = None

    def __init__(
        self, pool: KVMemory | PoolShape, departures: Staging, arrivals: Staging, marks: Marks, shown: ShownPool | None = None
    ) -> None:
        """Create it. `pool` gives the shape, with all heads; both stagings copy from and to its tensor, `marks` belongs to the
        steps that write to it. `shown` is the same pool for workers that read it in place on the device (cuda_ipc, nixl)."""
        self.num_layers, self.num_blocks = pool.num_layers, pool.num_blocks
        self.bytes_per_layer_block = pool.bytes_per_layer_block
        self.num_planes = pool.num_planes
        self.marks, self.shown = marks, shown
        self.departures, self._arrivals = PieceAllocator(departures), PieceAllocator(arrivals)

    @property
    def part_bytes(self) -> int:
        """Return the largest part that `fetch` takes at once."""
        return self.departures.staging.sizes.piece_bytes

    def memory(self) -> memoryview:
        raise ValueError("the KV pool is staged: its bytes cannot be viewed")

    def block_view(self, layer: int, plane: int, block_id: int) -> memoryview:
        raise ValueError("the KV pool is staged: its bytes cannot be viewed")

    async def fetch(self, layers: range, block_ids: Sequence[int], after: Mark) -> FilledPiece:
        """Return the part as it is at `after`, in wire order, once the device has computed and copied it. The caller gives it
        back with `give_back`."""
        await self.reached(after)
        return await self.filled(await self.departures.take(), layers, block_ids, after)

    async def reached(self, mark: Mark) -> None:
        """Wait for `mark` without holding a piece: a part that is not computed yet blocks no other."""
        reached = self.marks.reached(mark)
        if not reached.done():
            await asyncio.wrap_future(reached)
        reached.result()

    async def filled(self, piece: Piece, layers: range, block_ids: Sequence[int], after: Mark) -> FilledPiece:
        """Fill the caller's piece with the part and return it; on an error the piece is given back."""
        try:
            await settled(self.departures.staging.fetch(piece, layers, block_ids, after))
            return FilledPiece(piece, piece.view(self.departures.staging.num_bytes(layers, len(block_ids))))
        except BaseException:
            self.departures.give_back(piece)
            raise

    def give_back(self, filled_piece: FilledPiece) -> None:
        """Give the piece back. Nothing reads its view any more."""
        filled_piece.view.release()
        self.departures.give_back(filled_piece.piece)

    async def store(self, content: Bytes, layers: range, block_ids: Sequence[int], after: Mark, stream: Interruptible) -> None:
        """Write [layers, 2, blocks, bytes_per_layer_block] into the pool once the mark `after` is reached; return when it is
        there.

        Raises PeerClosed when interrupted; nothing is written any more then.
        """
        copies: list[Future[None]] = []
        try:
            async for cell, piece in self._cells(layers, len(block_ids)):
                rows = slice(cell.layer_start - layers.start, cell.layer_end - layers.start)
                part = content[rows, :, cell.block_start : cell.block_end]
                try:
                    await stream.run(_copy, piece.host.numpy(), part)
                    stream.check_interrupted()
                    ids = block_ids[cell.block_start : cell.block_end]
                    copies.append(self._arrivals.staging.store(piece, cell.layers, ids, after))
                finally:
                    self._arrivals.give_back_behind(piece)
        finally:
            await all_settled(copies)

    async def place(
        self,
        staging: HostStaging,
        part: Part,
        conversion: Conversion | None,
        block_ids: Sequence[int],
        first_token: int,
        after: Mark,
        stream: Stream,
    ) -> None:
        """Write the contents of `staging`, which are `part`, into `block_ids` (of the whole request): as they are, or converted
        like Conversion.write. For a conversion the blocks of the part are copied to the host, changed there and copied back; one
        part at a time for a request."""
        if conversion is None:
            await self.store(staging.bytes, part.layers, block_ids[part.block_start : part.block_end], after, stream)
            return
        blocks = conversion.blocks(part, len(block_ids), first_token)
        if not blocks:
            return
        ids = [block_ids[block] for block in blocks]
        near = HostStaging(Part(0, 0, len(part.layers), 0, len(blocks)), self.bytes_per_layer_block, self.num_planes)
        await self._load(near.bytes, part.layers, ids, after, stream)
        local_ids = range(-blocks.start, len(block_ids) - blocks.start)  # the first of `blocks` has index 0 in `near`
        local = replace(part, layer_start=0, layer_end=len(part.layers))
        await stream.run(conversion.write, staging, local, near, local_ids, first_token, stream.check_interrupted)
        await self.store(near.bytes, part.layers, ids, after, stream)

    def close(self) -> None:
        """Wait for copies that are under way; idempotent. No transfer may run any more."""
        for pieces in (self.departures, self._arrivals):
            pieces.staging.close()
        if self.shown is not None:
            self.shown.close()
        self.marks.close()

    async def _load(self, content: Bytes, layers: range, block_ids: Sequence[int], after: Mark, stream: Stream) -> None:
        """Copy from the pool into `content`, the reverse of `store`."""
        async for cell, piece in self._cells(layers, len(block_ids)):
            rows = slice(cell.layer_start - layers.start, cell.layer_end - layers.start)
            part = content[rows, :, cell.block_start : cell.block_end]
            try:
                ids = block_ids[cell.block_start : cell.block_end]
                await settled(self._arrivals.staging.fetch(piece, cell.layers, ids, after))
                await stream.run(_copy, part, piece.host.numpy())
            finally:
                self._arrivals.give_back_behind(piece)

    async def _cells(self, layers: range, num_blocks: int) -> AsyncIterator[tuple[Part, Piece]]:
        """Yield layers × blocks in cells of at most a piece, each with a piece that the caller gives back."""
        size = self._arrivals.staging.sizes.piece_bytes
        for cell in cut(0, layers, range(num_blocks), self.bytes_per_layer_block, size):
            yield cell, await self._arrivals.take()


def _copy(target: Bytes, source: Bytes) -> None:
    """Copy between a piece, of which a prefix is used, and an array that determines the length. Releases the GIL."""
    if target.ndim == 1:
        np.copyto(target[: source.size].reshape(source.shape), source)
    else:
        np.copyto(target, source[: target.size].reshape(target.shape))
