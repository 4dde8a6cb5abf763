"""Which part of a request's KV is sent next, while later layers and tokens are still computed. Pure.

A request's blocks are cut into stripes: the blocks that one engine step made final. A stripe is sent in groups of layers, as the
step gets through them; what is final already (a cached prefix, an earlier step) is a stripe of all layers at once.

            blocks ►  stripe 1 │ stripe 2 (being computed)
    layers    group 1    a     │    c
      ▼       group 2    b     │    d ◄ sent when the step has passed it
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtransfer.manifest import TARGET_PART_BYTES, Part, cut
from pdmesh.v1 import transfer_pb2

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
