"""Parts of one push on their way to its connections, the next ones fetched from their device while the former are sent.

    pipeline ─ put ─► [ part ][ part ] ─ get ─► a connection: sends it, drops it
                        └──────┴─ fetched ahead: behind the mark at which they are final, into pieces that nobody needs

A part whose turn has come and that was not fetched, or whose piece was taken away, is fetched then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.manifest import Part
from kvtransfer.schedule import Ready
from kvtransfer.staging import Lent, StagedMemory
from kvtransfer.waiting import ended

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.streams import Mark


class OutboundPart:
    """A part, and the blocks of our pool that it lies in. `final`: where the pool is staged. `is_shown`: the receiver's device
    reads it there, so nothing is fetched."""

    def __init__(self, part: Part, block_ids: Sequence[int], final: Final | None = None, *, is_shown: bool = False) -> None:
        self.part, self.block_ids = part, block_ids
        self._final, self._is_shown = final, is_shown
        self._ahead: Ahead | None = None

    @property
    def at(self) -> Mark:
        """Where it is final; of a staged pool."""
        assert self._final is not None, "memory that can be viewed has no marks"
        return self._final.at

    def begin(self) -> None:
        """Fetch it before its turn, if that is in nobody's way."""
        if self._final is not None and not self._is_shown:
            self._ahead = Ahead(self._final, self.part.layers, self.block_ids)

    async def fetched(self) -> Lent:
        """Its turn has come. To be given back; whoever is cancelled meanwhile drops it."""
        assert self._final is not None, "parts of memory that can be viewed are not fetched"
        lent = None if self._ahead is None else await self._ahead.claim()
        return lent or await self._final.memory.fetch(self.part.layers, self.block_ids, self._final.at)

    async def drop(self) -> None:
        """Returns when nothing is read for it, and what was fetched ahead is given back; idempotent."""
        if self._ahead is not None:
            await self._ahead.drop()


@dataclass(frozen=True)
class Final:
    """What lies in a staged pool at this mark may be read."""

    memory: StagedMemory
    at: Mark


class Told:
    """Behind which mark a part is final, by what the prefill had told when it told of it: a link that is slower than the prefill
    does not wait for steps that came later."""

    def __init__(self, memory: StagedMemory) -> None:
        self._memory = memory
        self._step = memory.marks.so_far()
        self._whole: list[tuple[int, Mark]] = []  # of blocks final in all layers: how many, behind which mark

    def note(self, ready: Ready) -> None:
        """As soon as it is told."""
        self._step = self._memory.marks.so_far()
        if ready.num_blocks > (self._whole[-1][0] if self._whole else 0):
            self._whole.append((ready.num_blocks, self._step.behind(self._memory.num_layers)))

    def final(self, part: Part) -> Final:
        """Of a part that may be sent by now."""
        marks = (mark for num_blocks, mark in self._whole if num_blocks >= part.block_end)
        return Final(self._memory, next(marks, None) or self._step.behind(part.layer_end))


class SendQueue:
    """Parts that wait for one of a push's connections, at most one for each."""

    def __init__(self, num_connections: int) -> None:
        self._num_connections = num_connections
        self._waiting: asyncio.Queue[OutboundPart | None] = asyncio.Queue(num_connections)

    async def put(self, departure: OutboundPart) -> None:
        """Waits for room."""
        await self._waiting.put(departure)
        departure.begin()  # nobody has looked at it yet

    async def end(self) -> None:
        """Behind the last part."""
        for _ in range(self._num_connections):
            await self._waiting.put(None)

    async def get(self) -> OutboundPart | None:
        """The next one, the caller's to drop; None: there are no more, for this connection."""
        return await self._waiting.get()

    async def drop(self) -> None:
        """Those that nobody has got; all of them, however often the caller is cancelled."""
        left = [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]
        await asyncio.gather(*(departure.drop() for departure in left if departure is not None), return_exceptions=True)


class Ahead:
    """A part that is fetched before its turn. Satisfies Yielding."""

    def __init__(self, final: Final, layers: range, block_ids: Sequence[int]) -> None:
        self._final, self._layers, self._block_ids = final, layers, block_ids
        self._door = final.memory.departures
        self._has_piece = self._gives_way = False
        self._lent: Lent | None = None
        self._task = asyncio.create_task(self._fetch())

    async def claim(self) -> Lent | None:
        """The caller's from now on. None: nothing was fetched, or it was taken away; he takes his turn."""
        self._door.keep(self)
        if not self._has_piece:
            await self.drop()
            return None
        await asyncio.wait([self._task])
        self._task.result()
        lent, self._lent = self._lent, None
        return lent

    def give_way(self) -> None:
        self._gives_way = True
        self._give_back()

    async def drop(self) -> None:
        """Returns when nothing is read any more and the piece is back; idempotent."""
        self._door.keep(self)
        self._task.cancel()
        try:
            await ended(self._task)
        finally:
            self._give_back()

    async def _fetch(self) -> None:
        memory, at = self._final.memory, self._final.at
        await memory.reached(at)
        piece = await self._door.take_spare(self)
        if piece is None:
            return
        self._has_piece = True
        try:
            self._lent = await memory.filled(piece, self._layers, self._block_ids, at)
        except BaseException:
            self._door.keep(self)  # there is nothing to take away
            raise
        if self._gives_way:
            self._give_back()

    def _give_back(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            self._final.memory.give_back(lent)
