"""The pool of KV blocks: reference counts, cached prefixes, and the order of eviction.

    free, LRU:   uncached ... | cached, oldest ... cached, youngest      allocate() takes from the left
    in use:      ref count >= 1; a block with a hash may be held by several sequences

A block that is freed keeps its hash and its content until it is allocated again, so a later prompt may find it.
Blocks without a hash cannot be reused by a prompt and are allocated first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdmesh.engine.errors import IntegrityError

# What a prefix cache has gained and lost, for an index of it elsewhere
#
# Only the latest state of a block counts, so a block that is stored and evicted between two readings costs one entry. A log that
# is not read stays small: it drops everything and skips a number, which tells the reader that changes were lost.


@dataclass(frozen=True)
class BlockChanges:
    """Net changes since the last reading: no hash is in both lists. `sequence` is one more than before unless some were lost."""

    sequence: int
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class BlockLog:
    """Log changes. It is written and taken on the engine thread; `pending` may be called on any."""

    def __init__(self, max_changes: int) -> None:
        self.sequence = 0  # number of what was taken last
        self._max_changes = max_changes
        self._changes: dict[bytes, bool] = {}
        self._has_overflowed = False

    @property
    def pending(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._changes) or self._has_overflowed

    def note(self, block_hash: bytes, *, stored: bool) -> None:
        """Record that the block is stored now, or evicted."""
        self._changes[block_hash] = stored
        if len(self._changes) > self._max_changes:
            self._changes.clear()
            self._has_overflowed = True

    def take(self) -> BlockChanges | None:
        """Return what has changed; None: nothing. Readings before and after a gap have numbers that do not follow each other."""
        if not self.pending:
            return None
        self.sequence += 2 if self._has_overflowed else 1
        changes, self._changes, self._has_overflowed = self._changes, {}, False
        stored = tuple(block for block, is_stored in changes.items() if is_stored)
        evicted = tuple(block for block, is_stored in changes.items() if not is_stored)
        return BlockChanges(self.sequence, stored, evicted)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the blocks that so many tokens fill, the last one perhaps in part."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Count references of block ids 0 to num_blocks - 1. It knows no tokens and no tensors."""

    def __init__(self, num_blocks: int) -> None:
        self.num_total = num_blocks
        self.log: BlockLog | None = None  # logs what is published and evicted, if it is set
        self._refs = [0] * num_blocks
        self.highest_used = -1  # the highest block id that was ever used
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Return the free blocks, those with a reusable prefix included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return the blocks with a published prefix, in use or free."""
        return len(self._block_of)

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return blocks of the longest published prefix of a hash chain. They are not pinned: acquire() them before the next
        allocate()."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Return how many of these are free: acquiring them leaves that many fewer free blocks."""
        return sum(not self._refs[block_id] for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._refs[block_id] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks of undefined content, one reference each; None when fewer are free. Evicts the least recently
        used."""
        if count > len(self._free):
            return None
        return [self._take() for _ in range(count)]

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each, the last first: the end of a chain is useless without its beginning and is evicted
        first."""
        for block_id in reversed(list(block_ids)):
            if not self._refs[block_id]:
                raise IntegrityError(f"block {block_id} is released but no sequence holds it")
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=block_id in self._hash_of)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Publish a full, computed block as a prefix. Of equal blocks the one that was published first is found."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash
            if self.log is not None:
                self.log.note(block_hash, stored=True)

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the prefix cache, whose content turned out to be useless. Sequences that hold them keep them."""
        for block_id in block_ids:
            self._forget(block_id)

    def published(self) -> tuple[bytes, ...]:
        """Return the hashes of all blocks that hold a reusable prefix."""
        return tuple(self._block_of)

    def check(self, references: Mapping[int, int]) -> None:
        """Raise IntegrityError unless free + used == total, ref counts are those in `references`, and hashes are one to one."""
        used = {block_id: refs for block_id, refs in enumerate(self._refs) if refs}
        if used != dict(references):
            raise IntegrityError(f"ref counts {used} are not what sequences hold: {dict(references)}")
        if len(self._free) + len(used) != self.num_total or not used.keys().isdisjoint(self._free):
            raise IntegrityError(f"{len(self._free)} free + {len(used)} used blocks are not {self.num_total}")
        if self._hash_of != {block_id: block_hash for block_hash, block_id in self._block_of.items()}:
            raise IntegrityError("the prefix cache's two maps contradict each other")

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        self._refs[block_id] = 1
        self.highest_used = max(self.highest_used, block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if self.log is not None:
                self.log.note(block_hash, stored=False)
