"""Blocks that were published to the prefix cache, in order, for a tier beneath the pool that copies them.

Only names are logged: what a block holds is read later, while it is pinned, and a block that is gone by then is skipped. A log
that is not read stays small: it drops its oldest names.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class BlockName:
    """Name a block. `root` of the chain stands for the model and the tenant, `parent` is the hash of the block before it, or the
    root."""

    root: bytes
    parent: bytes
    block_hash: bytes


def names_of(root: bytes, hashes: Sequence[bytes], first: int = 0) -> list[BlockName]:
    """Return the names of the blocks of a chain from block `first` on; `hashes` are those of all its blocks."""
    return [BlockName(root, hashes[index - 1] if index else root, hashes[index]) for index in range(first, len(hashes))]


MOST_USED = 256
"""Prompts whose cached beginnings are logged until they are taken."""


class PublishedBlocks:
    """Log published blocks. It is written and read under the engine's lock; `pending` may be called without."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._keep_s: OrderedDict[BlockName, float] = OrderedDict()
        self._withdrawn: list[BlockName] = []
        self._used: deque[tuple[bytes, ...]] = deque(maxlen=MOST_USED)
        self.num_dropped = 0

    @property
    def pending(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._keep_s)

    def note(self, names: Iterable[BlockName], keep_s: float) -> None:
        """Record blocks, in the order of a chain, with the seconds for which a session wants them to be kept (0: none does)."""
        for name in names:
            self._keep_s[name] = max(keep_s, self._keep_s.get(name, 0.0))
        while len(self._keep_s) > self._max_blocks:
            self._keep_s.popitem(last=False)
            self.num_dropped += 1

    def withdraw(self, names: Iterable[BlockName]) -> None:
        """Record blocks whose content turned out to be useless: tiers that have copied them give them up."""
        for name in names:
            self._keep_s.pop(name, None)
            self._withdrawn.append(name)

    def note_used(self, hashes: Sequence[bytes]) -> None:
        """Record that a prompt, or another worker, found these blocks."""
        self._used.append(tuple(hashes))

    def take_used(self) -> list[tuple[bytes, ...]]:
        """Return the hashes of what was found since the last call, by the finding."""
        used, self._used = self._used, deque(maxlen=MOST_USED)
        return list(used)

    def take_withdrawn(self) -> list[BlockName]:
        """Return what was withdrawn since the last call."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def take(self, most: int) -> list[tuple[BlockName, float]]:
        """Return at most so many blocks, the oldest first, each with its seconds; they are forgotten here."""
        taken = list(islice(self._keep_s.items(), most))
        for name, _ in taken:
            del self._keep_s[name]
        return taken
