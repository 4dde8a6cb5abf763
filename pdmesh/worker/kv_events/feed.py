"""The feed of KV events: what the engine's prefix cache gains and loses, for several readers, each at its own pace.

    engine's log ── take, each PERIOD_S while there are readers ──► backlog of each reader ──► gRPC, ZMQ

A reader begins with the full list. One whose backlog is full loses it, and gets the full list again: nothing waits for a reader,
and nothing grows without bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from pdmesh.engine.errors import EngineStopped
from pdmesh.engine.kv_cache.block_events import BlockEvents, StoredBlock
from pdmesh.runtime.backlog import Backlog
from pdmesh.runtime.errors import ResourceExhausted, Unavailable
from pdmesh.text.block_hash import in_chains
from pdmesh.worker.engines.base import BlockEventSource

PERIOD_S = 0.03
MAX_READERS = 32
MAX_WAITING_BLOCKS = 1 << 16

Chain: TypeAlias = Sequence[StoredBlock]
"""Blocks that follow each other in a prompt, of one root and adapter."""


@dataclass(frozen=True)
class Update:
    """Tell a reader what is new: the full list, or changes. Parents come before their children."""

    is_list: bool
    removed: tuple[bytes, ...]
    chains: tuple[Chain, ...]


class BlockFeed:
    """Give the blocks of one worker to readers, on one event loop, while `run` runs."""

    def __init__(self, source: BlockEventSource) -> None:
        self._source = source
        self._readers: set[Backlog[BlockEvents]] = set()
        self._taking = asyncio.Lock()  # what is taken reaches all readers before more is taken
        self._closed = False

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    async def run(self) -> None:
        """Take changes until cancelled. Raises EngineStopped."""
        while True:
            if self._readers and self._source.has_changes:
                async with self._taking:
                    self._spread(await self._source.take())
            await asyncio.sleep(PERIOD_S)

    def close(self) -> None:
        """End all reading."""
        self._closed = True
        for reader in self._readers:
            reader.close()

    @contextmanager
    def reader(self) -> Iterator[Backlog[BlockEvents]]:
        """Add a reader, for `read`. Raises ResourceExhausted."""
        if len(self._readers) >= MAX_READERS:
            raise ResourceExhausted(f"{MAX_READERS} readers of KV events are the most; end one of them", retry_delay_s=10.0)
        backlog = Backlog[BlockEvents](MAX_WAITING_BLOCKS)
        self._readers.add(backlog)
        try:
            if self._closed:
                backlog.close()
            yield backlog
        finally:
            self._readers.discard(backlog)

    async def read(self, backlog: Backlog[BlockEvents]) -> AsyncIterator[Update]:
        """Yield the full list, then changes, until the feed is closed. Raises Unavailable when the engine has stopped."""
        while not backlog.closed:
            if backlog.has_dropped:
                blocks = await self._all(backlog)
                yield Update(True, (), await asyncio.to_thread(_all_chains, blocks))
            events = await backlog.get()
            if events is not None:
                yield Update(False, events.removed, tuple(chains_of(events.stored)))

    async def _all(self, backlog: Backlog[BlockEvents]) -> tuple[StoredBlock, ...]:
        async with self._taking:
            try:
                changes, blocks = await self._source.take_all()
            except EngineStopped as error:
                raise Unavailable(f"this worker is stopping: {error}") from error
            self._spread(changes)
            backlog.restart()
        return blocks

    def _spread(self, events: BlockEvents | None) -> None:
        if events is not None:
            for reader in self._readers:
                reader.put(events, len(events.stored) + len(events.removed))


def _all_chains(blocks: Iterable[StoredBlock]) -> tuple[Chain, ...]:
    return tuple(chains_of(blocks))  # here, as an iterator would leave the work to its reader


def chains_of(blocks: Iterable[StoredBlock]) -> Iterator[Chain]:
    """Yield blocks as chains, each behind that of its parent if that is among them."""
    return in_chains(blocks, lambda block: block.block_hash, lambda block: block.parent)
