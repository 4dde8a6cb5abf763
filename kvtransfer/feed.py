"""What a prefill tells the push that follows it: which blocks are final by now, and in the end how it went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pdmesh.v1 import transfer_pb2


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


class KVFeed:
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


def complete_feed(num_layers: int, num_blocks: int, ending: Ending) -> KVFeed:
    """Of a prefill that is over."""
    feed = KVFeed()
    feed.advance(Ready(num_blocks, num_blocks, num_layers))
    feed.end(ending)
    return feed
