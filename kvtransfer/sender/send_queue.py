"""Parts of one push on their way to its connections, the next ones fetched from their device while the former are sent.

    pipeline ─ put ─► [ part ][ part ] ─ get ─► a connection: sends it, drops it
                        └──────┴─ fetched ahead: behind the mark at which they are final, into pieces that nobody needs

A part whose turn has come and that was not fetched, or whose piece was taken away, is fetched then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.manifest import TARGET_PART_BYTES, Part, cut
from kvtransfer.staging import Lent, StagedMemory
from kvtransfer.stream import ended
from pdmesh.v1 import transfer_pb2

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.streams import Mark


# Which part of a request's KV is sent next, while later layers and tokens are still computed. Pure.
#
# A request's blocks are cut into stripes: the blocks that one engine step made final. A stripe is sent in groups of layers, as
# the step gets through them; what is final already (a cached prefix, an earlier step) is a stripe of all layers at once.
#
#             blocks ►  stripe 1 │ stripe 2 (being computed)
#     layers    group 1    a     │    c
#       ▼       group 2    b     │    d ◄ sent when the step has passed it


# What a prefill tells the push that follows it: which blocks are final by now, and in the end how it went.


@dataclass(frozen=True)
class Ready:
    """Counted in blocks of the request: the first `num_blocks` are final in all layers, the first `num_step_blocks` in the first
    `num_layers` layers."""

    num_blocks: int = 0
    num_step_blocks: int = 0
    num_layers: int = 0


@dataclass(frozen=True)
class FirstTokensDrawn:
    """The prefill is complete: these tokens travel with the commit."""

    choices: Sequence[transfer_pb2.CommittedChoice]


@dataclass(frozen=True)
class NothingToDecode:
    """Every choice ended with its first token: the reservation is to be released."""

    reason: str


Ending = FirstTokensDrawn | NothingToDecode


class KVReadiness:
    """One prefill writes, one push reads, both on the event loop. `group`: layers of which the push wants to hear at once.
    on_ready(ready) is called when more is final, on_end() when the prefill ends."""

    def __init__(self) -> None:
        self.ready = Ready()
        self.ending: Ending | None = None
        self.group = 0
        self.on_ready: Callable[[Ready], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._changed = asyncio.Event()

    def advance(self, ready: Ready) -> None:
        """More is final. News may come late: what was said before stays true."""
        before = self.ready
        if ready == before or ready.num_step_blocks < before.num_step_blocks or ready.num_blocks < before.num_blocks:
            return
        if ready.num_step_blocks == before.num_step_blocks and ready.num_layers < before.num_layers:
            return
        self.ready = ready
        self._changed.set()
        if self.on_ready is not None:
            self.on_ready(ready)

    def end(self, ending: Ending) -> None:
        """Once, behind the last `advance`."""
        self.ending = ending
        self._changed.set()
        if self.on_end is not None:
            self.on_end()

    async def changed(self, timeout_s: float) -> bool:
        """Waits until something is new since the last call; False after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        was_set = self._changed.is_set()
        self._changed.clear()
        return was_set


def complete_readiness(num_layers: int, num_blocks: int, ending: Ending) -> KVReadiness:
    """Of a prefill that is over."""
    feed = KVReadiness()
    feed.advance(Ready(num_blocks, num_blocks, num_layers))
    feed.end(ending)
    return feed


# What a group costs the prefill that goes on meanwhile: event loops and threads of both ends take cores from it, and all its
# threads wait for the one that was interrupted.
GROUP_COST_S = 1e-3


def choose_group(num_layers: int, bytes_per_s: float, layer_bytes: int) -> int:
    """Layers of a group. With n groups the n-th part of the transfer is exposed behind the last layer, and n groups cost theirs:
    together least at the square root of their ratio."""
    transfer_s = num_layers * layer_bytes / bytes_per_s
    num_groups = max(1, round(math.sqrt(transfer_s / GROUP_COST_S)))
    return -(-num_layers // min(num_layers, num_groups))


class Pipeline:
    """Cuts layers [0, num_layers) × blocks [first_block, num_blocks) into parts of at most `target_bytes` (or one block)."""

    def __init__(
        self,
        num_layers: int,
        first_block: int,
        num_blocks: int,
        bytes_per_layer_block: int,
        target_bytes: int = TARGET_PART_BYTES,
    ) -> None:
        self.num_parts = 0
        self._num_layers = num_layers
        self._num_blocks = num_blocks
        self.bytes_per_layer_block = bytes_per_layer_block
        self.target_bytes = target_bytes  # of parts that are taken from now on
        self._begin = first_block  # all before it is on its way
        self._end = first_block  # of the present stripe
        self._layer = 0  # its layers below are on their way

    @property
    def is_complete(self) -> bool:
        """Everything has been taken."""
        return self._begin >= self._num_blocks

    def take(self, ready: Ready, group_of: Callable[[int], int]) -> Iterator[Part]:
        """Parts that may be sent by now and were not taken before. `group_of(bytes of a layer)`: layers of a group."""
        while not self.is_complete:
            if self._end == self._begin and not self._next_stripe(ready):
                return
            layers = self._layers_to_send(ready, group_of(2 * (self._end - self._begin) * self.bytes_per_layer_block))
            if not layers:
                return
            for part in cut(self.num_parts, layers, range(self._begin, self._end), self.bytes_per_layer_block, self.target_bytes):
                self.num_parts += 1
                yield part
            self._layer = layers.stop
            if self._layer == self._num_layers:
                self._begin, self._layer = self._end, 0

    def _next_stripe(self, ready: Ready) -> bool:
        final = ready.num_blocks if ready.num_blocks > self._begin else ready.num_step_blocks
        self._end = max(self._begin, min(final, self._num_blocks))
        return self._end > self._begin

    def _layers_to_send(self, ready: Ready, group: int) -> range:
        """Whole groups of the stripe's layers that are final and not sent; the last group may be smaller."""
        if self._end <= ready.num_blocks:
            return range(self._layer, self._num_layers)
        final = ready.num_layers if self._end <= ready.num_step_blocks else 0
        if final < self._num_layers:
            final -= max(0, final - self._layer) % group
        return range(self._layer, max(self._layer, final))


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
