"""Whether it is worth writing blocks before anything has used them again: learned from what became of the blocks before.

    published ──► used again, in the pool or behind it          a hit
              └─► not used for half a minute                    a miss, until it is used after all

Where next to nothing is used twice, writing costs processor time, memory bandwidth and the life of a disk for nothing: then only
blocks are written that have been used a second time, or that a session wants. Hashes alone are watched, so that the first
conversations that come back are seen although nothing of them was written.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from pdmesh.engine.kv_cache.published_blocks import BlockName

K = TypeVar("K")
V = TypeVar("V")

WORTH = 0.05
"""The share of blocks that have to be used again. Writing a block of 0.4 MB takes a core some 0.4 ms, computing it some 10 ms."""
PATIENCE_S = 30.0
"""A block that was not used for so long counts as not used, for the time being."""
LEAST_OUTCOMES, MOST_OUTCOMES = 256, 4096
"""Blocks whose fate is known: with fewer everything is written; of more the last ones count."""
MOST_HASHES, MOST_NAMES = 1 << 18, 1 << 16
"""Blocks whose hashes are remembered after they were not used, of four million tokens in blocks of 16; blocks that were not
written."""


class ReuseWatch:
    """Watch blocks. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._young: OrderedDict[bytes, float] = OrderedDict()  # with the time until which they may be used
        self._missed: OrderedDict[bytes, None] = OrderedDict()
        self._skipped: OrderedDict[bytes, BlockName] = OrderedDict()  # those that were not written
        self._again: OrderedDict[BlockName, None] = OrderedDict()  # of these, those that were used since
        self._outcomes: deque[bool] = deque(maxlen=MOST_OUTCOMES)

    @property
    def is_worth(self) -> bool:
        """Return whether blocks are to be written at once."""
        self._age()
        return len(self._outcomes) < LEAST_OUTCOMES or sum(self._outcomes) >= WORTH * len(self._outcomes)

    @property
    def has_again(self) -> bool:
        """Return whether `take_again` would return something."""
        return bool(self._again)

    def used(self, hashes: Iterable[bytes]) -> None:
        """Record that a prompt contains these blocks, or that another worker reads them, wherever they are."""
        for block_hash in hashes:
            if self._young.pop(block_hash, None) is not None or self._missed.pop(block_hash, 0) is None:
                self._outcomes.append(True)
            if name := self._skipped.pop(block_hash, None):
                self._again[name] = None
        _bound(self._again, MOST_NAMES)

    def chosen(self, published: Mapping[BlockName, float]) -> dict[BlockName, float]:
        """Return those of some blocks that were published, each with the seconds for which a session wants it, that are to be
        written now."""
        until, is_worth = self._clock() + PATIENCE_S, self.is_worth
        for name in published:
            if name.block_hash not in self._missed:
                self._young.setdefault(name.block_hash, until)
            if not is_worth and not published[name]:
                self._skipped[name.block_hash] = name
        _bound(self._skipped, MOST_NAMES)
        return {name: keep_s for name, keep_s in published.items() if is_worth or keep_s}

    def take_again(self, most: int) -> dict[BlockName, float]:
        """Return at most so many blocks that were not written when they were published, and have been used since."""
        taken: dict[BlockName, float] = {}
        while self._again and len(taken) < most:
            taken[self._again.popitem(last=False)[0]] = 0.0
        return taken

    def _age(self) -> None:
        now = self._clock()
        while self._young and (len(self._young) > MOST_NAMES or next(iter(self._young.values())) <= now):
            block_hash, _ = self._young.popitem(last=False)
            self._missed[block_hash] = None
            self._outcomes.append(False)
        _bound(self._missed, MOST_HASHES)


def _bound(blocks: OrderedDict[K, V], most: int) -> None:
    while len(blocks) > most:
        blocks.popitem(last=False)
