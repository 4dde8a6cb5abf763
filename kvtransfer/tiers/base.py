"""What a tier does, whichever memory it is on: it takes blocks in, lends them, and gives the least recently used up.

`holds`, `lacks`, `touch`, `take_changes` and `give_back` are called on the event loop and are short; `find`, `write_batch` and
`lend_batch` may take as long as a disk or a network does, and are called in threads. A tier whose memory is elsewhere is not
asked by `holds`, which says what is known: what was written, and what `find` has found.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.tiers.backends.index import TierIndex
from pdmesh.engine.kv_cache.published_blocks import BlockName


@dataclass(frozen=True)
class BlockBytes:
    """Hold what a block holds, keys and values of all layers, and its CRC-32C."""

    content: memoryview
    crc: int


@dataclass
class TierCounts:
    """Count a tier's blocks since the start."""

    num_written: int = 0
    num_read: int = 0
    num_corrupt: int = 0  # damaged, cut short or foreign: never used, and removed
    num_failed: int = 0  # reads and writes that the system refused


class Tier(Protocol):
    """Hold blocks beneath the pool."""

    name: str
    """As in metrics and logs: host, disk, store."""
    is_remote: bool
    """Whether what it has is known only by asking (`find`)."""
    may_be_shared: bool
    """Whether others may have written to it what this process is about to write (`look`)."""
    counts: TierCounts

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def max_bytes(self) -> int: ...

    @property
    def is_available(self) -> bool:
        """Return whether it is worth asking: what it is on has answered lately."""

    def holds(self, names: Iterable[BlockName]) -> list[bool]:
        """Return of each of these blocks whether it is here, as far as is known."""

    def find(self, names: Sequence[BlockName]) -> None:
        """Find out which of these blocks, in the order of a chain, are here, up to the first that is not."""

    def lacks(self, names: Iterable[BlockName]) -> list[BlockName]:
        """Return those of the blocks that are not here and may be written."""

    def touch(self, names: Iterable[BlockName], keep_s: float = 0.0) -> None:
        """Record that blocks are used now, and are wanted for `keep_s` more seconds."""

    def write_batch(self, blocks: Sequence[tuple[BlockName, BlockBytes, float]]) -> None:
        """Take blocks in, each with the seconds for which it is wanted, as far as there is room; nothing is raised where the
        system refuses."""

    def lend_batch(self, names: Sequence[BlockName]) -> list[BlockBytes]:
        """Return the blocks up to the first that is gone, or is not as it was written and is forgotten. Their CRCs are to be
        compared by the reader, which calls `give_back` for each."""

    def give_back(self, name: BlockName, *, is_damaged: bool) -> None:
        """End the loan of a block; a damaged one is forgotten and counted."""

    def forget(self, names: Iterable[BlockName]) -> None:
        """Give up blocks whose content turned out to be useless."""

    def look(self, names: Iterable[BlockName]) -> None:
        """Find out which of these blocks others have written."""

    def refresh(self) -> None:
        """Look what others have done to what is shared with them."""

    def take_changes(self) -> list[BlockName]:
        """Return the blocks that came or went since the last call."""

    def close(self) -> None: ...


class IndexedTier(ABC):
    """Keep what all tiers have: an index under a lock, and the changes of it."""

    is_remote = may_be_shared = False

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        """`clock`: seconds, by which blocks were used."""
        self.counts = TierCounts()
        self._index = TierIndex(max_bytes)
        self._lock = threading.Lock()
        self._changes: list[BlockName] = []
        self._clock = clock

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    @property
    def max_bytes(self) -> int:
        return self._index.max_bytes

    @property
    def is_available(self) -> bool:
        return True

    def holds(self, names: Iterable[BlockName]) -> list[bool]:
        with self._lock:
            return [name in self._index for name in names]

    def lacks(self, names: Iterable[BlockName]) -> list[BlockName]:
        with self._lock:
            return [name for name in names if name not in self._index]

    def touch(self, names: Iterable[BlockName], keep_s: float = 0.0) -> None:
        with self._lock:
            until = self._clock() + keep_s
            for name in names:
                self._index.touch(name, until)

    def find(self, names: Sequence[BlockName]) -> None:  # noqa: B027  what a tier of its own memory has to do: nothing
        """Do nothing: the index says it."""

    def write_batch(self, blocks: Sequence[tuple[BlockName, BlockBytes, float]]) -> None:
        for name, block, keep_s in blocks:
            self.write(name, block, keep_s)

    def lend_batch(self, names: Sequence[BlockName]) -> list[BlockBytes]:
        blocks: list[BlockBytes] = []
        for name in names:
            try:
                block = self.lend(name)
            except BaseException:
                for lent, _ in zip(names, blocks, strict=False):
                    self.give_back(lent, is_damaged=False)
                raise
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget(self, names: Iterable[BlockName]) -> None:
        for name in names:
            if self.lend(name) is not None:
                self.give_back(name, is_damaged=True)

    def look(self, names: Iterable[BlockName]) -> None:  # noqa: B027  the same
        """Do nothing: no other process writes to it."""

    def refresh(self) -> None:  # noqa: B027  what a tier of its own memory has to do: nothing
        """Do nothing: no other process shares it."""

    @abstractmethod
    def give_back(self, name: BlockName, *, is_damaged: bool) -> None:
        """End a loan."""

    @abstractmethod
    def write(self, name: BlockName, block: BlockBytes, keep_s: float) -> None:
        """Take a block in, if there is room."""

    @abstractmethod
    def lend(self, name: BlockName) -> BlockBytes | None:
        """Return a block; None: it is gone, or not as it was written, and is forgotten."""

    def take_changes(self) -> list[BlockName]:
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def check(self) -> None:
        """Raise IntegrityError unless the index is whole."""
        with self._lock:
            self._index.check()
