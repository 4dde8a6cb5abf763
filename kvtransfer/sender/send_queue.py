"""The choice of the parts of a request's KV that a push sends next, and the queue of parts in front of its connections.

    KVReadiness ─► Pipeline ─ put ─► [ part ][ part ] ─ get ─► a connection: sends it, drops it
                                       └──────┴─ prefetched from the device: after the mark at which they are final,
                                                 into pieces that no other push needs

When a connection takes a part that was not prefetched, or whose piece was taken away, the part is fetched then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.manifest import TARGET_PART_BYTES, Part, cut
from kvtransfer.staging import FilledPiece, StagedMemory
from kvtransfer.stream import ended
from pdmesh.v1 import transfer_pb2

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.streams import Mark


# Readiness: which blocks of a prefill are final, and how the prefill ended
#
# A request's blocks are cut into stripes: the blocks that one engine step made final. A stripe is sent in groups of layers, as
# the step gets through them; what is final already (a cached prefix, an earlier step) is a stripe of all layers at once.
#
#             blocks ►  stripe 1 │ stripe 2 (being computed)
#     layers    group 1    a     │    c
#       ▼       group 2    b     │    d ◄ sent when the step has passed it


@dataclass(frozen=True)
class Ready:
    """Count the final blocks of a request: the first `num_blocks` in all layers, the first `num_step_blocks` in the first
    `num_layers` layers."""

    num_blocks: int = 0
    num_step_blocks: int = 0
    num_layers: int = 0


@dataclass(frozen=True)
class FirstTokensDrawn:
    """The prefill is complete: these tokens travel with the commit. `is_exact`: no rounded KV was used for it."""

    choices: Sequence[transfer_pb2.CommittedChoice]
    is_exact: bool = True


@dataclass(frozen=True)
class NothingToDecode:
    """Every choice ended with its first token: the reservation is released."""

    reason: str


Ending = FirstTokensDrawn | NothingToDecode


class KVReadiness:
    """Connect one prefill, which writes, to one push, which reads, both on the event loop. `group` is how many layers the push
    wants at once. on_ready(ready) is called when more is final, on_end() when the prefill ends."""

    def __init__(self) -> None:
        self.ready = Ready()
        self.ending: Ending | None = None
        self.group = 0
        self.on_ready: Callable[[Ready], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._changed = asyncio.Event()

    def advance(self, ready: Ready) -> None:
        """Record that more is final. Reports may arrive late: an earlier state changes nothing."""
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
        """Record the end of the prefill, once, after the last `advance`."""
        self.ending = ending
        self._changed.set()
        if self.on_end is not None:
            self.on_end()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for a change since the last call; return False after `timeout_s` without one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        was_set = self._changed.is_set()
        self._changed.clear()
        return was_set


def complete_readiness(num_layers: int, num_blocks: int, ending: Ending) -> KVReadiness:
    """Return the readiness of a prefill that has ended."""
    feed = KVReadiness()
    feed.advance(Ready(num_blocks, num_blocks, num_layers))
    feed.end(ending)
    return feed


# The cost of a group to the prefill that runs meanwhile: event loops and threads of both ends take cores from it, and all its
# threads wait for an interrupted one.
GROUP_COST_S = 1e-3


def choose_group(num_layers: int, bytes_per_s: float, layer_bytes: int) -> int:
    """Return the number of layers in a group. With n groups 1/n of the transfer is exposed after the last layer, and each group
    costs GROUP_COST_S: the sum is least at n = sqrt(transfer time / GROUP_COST_S)."""
    transfer_s = num_layers * layer_bytes / bytes_per_s
    num_groups = max(1, round(math.sqrt(transfer_s / GROUP_COST_S)))
    return -(-num_layers // min(num_layers, num_groups))


class Pipeline:
    """Cut layers [0, num_layers) × blocks [first_block, num_blocks) into parts of at most `target_bytes` (or one block)."""

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
        self.target_bytes = target_bytes  # of the parts that are taken from now on
        self._begin = first_block  # all blocks before it were taken
        self._end = first_block  # end of the present stripe
        self._layer = 0  # the stripe's layers below it were taken

    @property
    def is_complete(self) -> bool:
        """Return whether everything was taken."""
        return self._begin >= self._num_blocks

    def take(self, ready: Ready, group_of: Callable[[int], int]) -> Iterator[Part]:
        """Yield the parts that may be sent by now and were not taken before. `group_of(bytes of a layer)` returns the number of
        layers in a group."""
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
        """Return whole groups of the stripe's layers that are final and not sent yet; the last group may be smaller."""
        if self._end <= ready.num_blocks:
            return range(self._layer, self._num_layers)
        final = ready.num_layers if self._end <= ready.num_step_blocks else 0
        if final < self._num_layers:
            final -= max(0, final - self._layer) % group
        return range(self._layer, max(self._layer, final))


class OutboundPart:
    """Hold a part and its blocks in our pool. `final`: the source of the part where the pool is staged. `is_shown`: the
    receiver's device reads the part in place, so nothing is fetched."""

    def __init__(self, part: Part, block_ids: Sequence[int], final: PartSource | None = None, *, is_shown: bool = False) -> None:
        self.part, self.block_ids = part, block_ids
        self._final, self._is_shown = final, is_shown
        self._prefetch: Prefetch | None = None

    @property
    def at(self) -> Mark:
        """Return the mark at which the part becomes final; only for a staged pool."""
        assert self._final is not None, "memory that can be viewed has no marks"
        return self._final.at

    def begin(self) -> None:
        """Start to prefetch the part; the prefetch ends when another push needs the piece."""
        if self._final is not None and not self._is_shown:
            self._prefetch = Prefetch(self._final, self.part.layers, self.block_ids)

    async def fetched(self) -> FilledPiece:
        """Return the part in a piece, which the caller gives back; a caller that is cancelled drops the part."""
        assert self._final is not None, "parts of memory that can be viewed are not fetched"
        filled = None if self._prefetch is None else await self._prefetch.claim()
        return filled or await self._final.memory.fetch(self.part.layers, self.block_ids, self._final.at)

    async def drop(self) -> None:
        """Return when nothing is read for the part any more and its prefetched piece is given back; idempotent."""
        if self._prefetch is not None:
            await self._prefetch.drop()


@dataclass(frozen=True)
class PartSource:
    """Locate a part in a staged pool, where it may be read once the mark `at` is reached."""

    memory: StagedMemory
    at: Mark


class Told:
    """Record the mark at which each part becomes final, at the time when the prefill reports it: a link that is slower than the
    prefill does not wait for later steps."""

    def __init__(self, memory: StagedMemory) -> None:
        self._memory = memory
        self._step = memory.marks.so_far()
        self._whole: list[tuple[int, Mark]] = []  # (number of blocks final in all layers, mark)

    def note(self, ready: Ready) -> None:
        """Record `ready`; call it as soon as the prefill reports it."""
        self._step = self._memory.marks.so_far()
        if ready.num_blocks > (self._whole[-1][0] if self._whole else 0):
            self._whole.append((ready.num_blocks, self._step.behind(self._memory.num_layers)))

    def final(self, part: Part) -> PartSource:
        """Return the source of a part that may be sent by now."""
        marks = (mark for num_blocks, mark in self._whole if num_blocks >= part.block_end)
        return PartSource(self._memory, next(marks, None) or self._step.behind(part.layer_end))


class SendQueue:
    """Queue parts for the connections of the push, at most one for each connection."""

    def __init__(self, num_connections: int) -> None:
        self._num_connections = num_connections
        self._waiting: asyncio.Queue[OutboundPart | None] = asyncio.Queue(num_connections)

    async def put(self, part: OutboundPart) -> None:
        """Append a part, waiting for room."""
        await self._waiting.put(part)
        part.begin()  # no connection has taken it yet

    async def end(self) -> None:
        """Tell each connection that no more parts come."""
        for _ in range(self._num_connections):
            await self._waiting.put(None)

    async def get(self) -> OutboundPart | None:
        """Return the next part, which the caller must drop; None: there are no more for this connection."""
        return await self._waiting.get()

    async def drop(self) -> None:
        """Drop all parts that no connection has taken, however often the caller is cancelled."""
        left = [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]
        await asyncio.gather(*(part.drop() for part in left if part is not None), return_exceptions=True)


class Prefetch:
    """Prefetch a part before a connection takes it. Satisfies PreemptibleHolder."""

    def __init__(self, final: PartSource, layers: range, block_ids: Sequence[int]) -> None:
        self._final, self._layers, self._block_ids = final, layers, block_ids
        self._pieces = final.memory.departures
        self._has_piece = self._is_preempted = False
        self._filled: FilledPiece | None = None
        self._task = asyncio.create_task(self._fetch())

    async def claim(self) -> FilledPiece | None:
        """Return the piece, which belongs to the caller from now on. None: nothing was prefetched, or the piece was taken away,
        so the caller fetches the part."""
        self._pieces.keep(self)
        if not self._has_piece:
            await self.drop()
            return None
        await asyncio.wait([self._task])
        self._task.result()
        filled, self._filled = self._filled, None
        return filled

    def preempt(self) -> None:
        self._is_preempted = True
        self._give_back()

    async def drop(self) -> None:
        """Return when nothing is read any more and the piece is given back; idempotent."""
        self._pieces.keep(self)
        self._task.cancel()
        try:
            await ended(self._task)
        finally:
            self._give_back()

    async def _fetch(self) -> None:
        memory, at = self._final.memory, self._final.at
        await memory.reached(at)
        piece = await self._pieces.take_spare(self)
        if piece is None:
            return
        self._has_piece = True
        try:
            self._filled = await memory.filled(piece, self._layers, self._block_ids, at)
        except BaseException:
            self._pieces.keep(self)  # `filled` has given the piece back
            raise
        if self._is_preempted:
            self._give_back()

    def _give_back(self) -> None:
        filled, self._filled = self._filled, None
        if filled is not None:
            self._final.memory.give_back(filled)
