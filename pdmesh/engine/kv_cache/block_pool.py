"""The pool of KV blocks: reference counts, cached prefixes, and the order of eviction.

    free, LRU:  uncached ... | lapsed ... | cached, oldest ... cached, youngest | retained | claimed    allocate(): from the left
    in use:     ref count >= 1; a block with a hash may be held by several sequences

A block that is freed keeps its hash and its content until it is allocated again, so a later prompt may find it.
Blocks without a hash cannot be reused by a prompt and are allocated first. Retained blocks (retention.py) are allocated when no
other is free: they are as free as the others, so retention makes no request wait.

A retained block is set aside when its turn to be evicted comes. So blocks that are set aside are less recently used than all
others, and one that lapses, because its time is over or its session was released, is the next to go.

Claimed blocks (claims.py), for which a request waits, are allocated last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.kv_cache.block_events import BlockEventLog
from pdmesh.engine.kv_cache.claims import BlockClaims
from pdmesh.engine.kv_cache.retention import NO_RETENTION, RetainedBlocks, Retention, RetentionBounds

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
    tier_stored: tuple[bytes, ...] = ()  # in tiers beneath the pool, whatever is in the pool
    tier_evicted: tuple[bytes, ...] = ()


class BlockLog:
    """Log changes. It is written and taken under the engine's lock; `pending` may be called without."""

    def __init__(self, max_changes: int) -> None:
        self.sequence = 0  # number of what was taken last
        self._max_changes = max_changes
        self._changes: dict[bytes, bool] = {}
        self._tier_changes: dict[bytes, bool] = {}
        self._has_overflowed = False

    @property
    def pending(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._changes) or bool(self._tier_changes) or self._has_overflowed

    def note(self, block_hash: bytes, *, stored: bool) -> None:
        """Record that the block is stored now, or evicted."""
        self._changes[block_hash] = stored
        self._keep_bound()

    def note_tier(self, block_hash: bytes, *, stored: bool) -> None:
        """Record that some tier beneath the pool holds the block now, or none any more."""
        self._tier_changes[block_hash] = stored
        self._keep_bound()

    def _keep_bound(self) -> None:
        if len(self._changes) + len(self._tier_changes) > self._max_changes:
            self._changes.clear()
            self._tier_changes.clear()
            self._has_overflowed = True

    def take(self) -> BlockChanges | None:
        """Return what has changed; None: nothing. Readings before and after a gap have numbers that do not follow each other."""
        if not self.pending:
            return None
        self.sequence += 2 if self._has_overflowed else 1
        changes, self._changes, self._has_overflowed = self._changes, {}, False
        tier_changes, self._tier_changes = self._tier_changes, {}
        return BlockChanges(self.sequence, *_by_end(changes), *_by_end(tier_changes))


def _by_end(changes: Mapping[bytes, bool]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return the blocks that are stored now, and the others."""
    stored = tuple(block for block, is_stored in changes.items() if is_stored)
    return stored, tuple(block for block, is_stored in changes.items() if not is_stored)


CLAIMED_SHARE = 4
"""One of so many blocks of a pool may be claimed."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the blocks that so many tokens fill, the last one perhaps in part."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Count references of block ids 0 to num_blocks - 1. It knows no tokens and no tensors."""

    def __init__(
        self,
        num_blocks: int,
        retention: RetentionBounds = NO_RETENTION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retention`: how many blocks may be retained. `clock`: seconds, by which their times end."""
        self.num_total = num_blocks
        self.retained = RetainedBlocks(retention, self._lapse, clock)
        self._retained_hashes = self.retained.hashes
        self.log: BlockLog | None = None  # logs what is published and evicted, if it is set
        self.events: BlockEventLog | None = None  # logs the same with token ids, if it is set
        self._refs = [0] * num_blocks
        self.is_closed = False  # while its memory is replaced: nothing is free
        self.highest_used = -1  # the highest block id that was ever used
        self.num_retained_evicted = 0  # retained blocks that were evicted before their time, since no other was free
        # Free blocks, in the order in which they are allocated.
        self._expendable: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # uncached, then lapsed
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._set_aside: OrderedDict[int, None] = OrderedDict()  # retained
        self._claimed: OrderedDict[int, None] = OrderedDict()
        self.claims = BlockClaims()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._inexact: dict[bytes, bool] = {}  # published blocks of rounded KV (True), or computed from such (False)

    @property
    def num_free(self) -> int:
        """Return the free blocks, those with a reusable prefix included."""
        if self.is_closed:
            return 0
        return len(self._expendable) + len(self._cached) + len(self._set_aside) + len(self._claimed)

    @property
    def num_retained(self) -> int:
        """Return the blocks that are retained now, in use or free."""
        self.retained.expire()
        return len(self.retained)

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

    @property
    def is_all_exact(self) -> bool:
        """Return whether all published blocks are."""
        return not self._inexact

    def is_exact(self, block_hash: bytes) -> bool:
        """Return whether a block neither holds rounded KV nor was computed from such."""
        return block_hash not in self._inexact

    def is_rounded(self, block_hash: bytes) -> bool:
        """Return whether a block holds KV that a tier has rounded."""
        return self._inexact.get(block_hash, False)

    def note_inexact(self, block_hash: bytes, *, is_rounded: bool) -> None:
        """Record that a published block holds rounded KV, or KV computed from such, until it is evicted."""
        self._inexact[block_hash] = is_rounded

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Return how many of these are free: acquiring them leaves that many fewer free blocks."""
        return sum(not self._refs[block_id] for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block_id in block_ids:
            if not self._refs[block_id]:
                self._pop_free(block_id)
            self._refs[block_id] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks of undefined content, one reference each; None when fewer are free. Evicts the least recently
        used, and retained ones last."""
        if count > self.num_free:
            return None
        self.retained.expire()
        return [self._take() for _ in range(count)]

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each, the last first: the end of a chain is useless without its beginning and is evicted
        first."""
        for block_id in reversed(list(block_ids)):
            if not self._refs[block_id]:
                raise IntegrityError(f"block {block_id} is released but no sequence holds it")
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                block_hash = self._hash_of.get(block_id)
                if block_hash is not None:
                    (self._claimed if block_hash in self.claims.hashes else self._cached)[block_id] = None
                else:
                    self._expendable[block_id] = None
                    self._expendable.move_to_end(block_id, last=False)

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """Publish a full, computed block as a prefix; False: there is an equal one. Of equal blocks the first one is found."""
        if block_hash in self._block_of or block_id in self._hash_of:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        if self.log is not None:
            self.log.note(block_hash, stored=True)
        return True

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the prefix cache, whose content turned out to be useless. Sequences that hold them keep them."""
        for block_id in block_ids:
            self._forget(block_id)

    def forget_all(self) -> None:
        """Take all blocks out of the prefix cache, none of which is in use: what they hold is about to be lost."""
        if self.num_free != self.num_total:
            raise IntegrityError(f"{self.num_total - self.num_free} blocks are in use, and all of them are to be forgotten")
        while len(self.claims):
            self.claims.drop_oldest()
        self.withdraw(list(self._hash_of))
        for queue in (self._cached, self._set_aside, self._claimed):
            queue.clear()
        self._expendable = OrderedDict.fromkeys(range(self.num_total))
        self.highest_used = -1

    def claim(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Evict the blocks of this hash chain after all others, those that come later too, until `unclaim`. All claims together
        have at most a quarter as many hashes as the pool has blocks, as they rank above what others retain: what is past that is
        left out of a chain, and the oldest claims go."""
        most = max(1, self.num_total // CLAIMED_SHARE)
        hashes = hashes[:most]
        self.unclaim(request_id)
        self.claims.add(request_id, hashes)
        while len(self.claims.hashes) > most:
            self._put_back(self.claims.drop_oldest())
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is not None and not self._refs[block_id]:
                self._pop_free(block_id)
                self._claimed[block_id] = None

    def unclaim(self, request_id: str) -> None:
        """Give up a request's claim; idempotent."""
        self._put_back(self.claims.drop(request_id))

    def _put_back(self, hashes: Sequence[bytes]) -> None:
        """Let blocks be evicted in their turn, now that no request claims them: as the youngest, the end of a chain first."""
        for block_hash in reversed(hashes):
            block_id = self._block_of.get(block_hash)
            if block_id is not None and self._claimed.pop(block_id, 0) is None:
                self._cached[block_id] = None

    def retain(self, retention: Retention, hashes: Iterable[bytes]) -> None:
        """Retain the longest published prefix of a hash chain, as far as the bounds allow. Its time begins now."""
        chain = list(takewhile(self._block_of.__contains__, hashes))
        for block_id in map(self._block_of.__getitem__, chain):
            if self._expendable.pop(block_id, 0) is None:  # a copy of it was used
                self._cached[block_id] = None
        self.retained.expire()
        self.retained.retain(retention, chain)

    def release_retained(self, tenant: str, session: str) -> int:
        """Give up what is retained for a session; its blocks stay in the prefix cache as others do. Return how many they were."""
        self.retained.expire()
        return self.retained.release(tenant, session)

    def published(self) -> tuple[bytes, ...]:
        """Return the hashes of all blocks that hold a reusable prefix."""
        return tuple(self._block_of)

    def check(self, references: Mapping[int, int]) -> None:
        """Raise IntegrityError unless free + used == total, ref counts are those in `references`, and hashes are one to one."""
        used = {block_id: refs for block_id, refs in enumerate(self._refs) if refs}
        if used != dict(references):
            raise IntegrityError(f"ref counts {used} are not what sequences hold: {dict(references)}")
        free = {*self._expendable, *self._cached, *self._set_aside, *self._claimed}
        if not len(free) + len(used) == self.num_free + len(used) == self.num_total or not used.keys().isdisjoint(free):
            raise IntegrityError(f"{self.num_free} free + {len(used)} used blocks are not {self.num_total}")
        if self._hash_of != {block_id: block_hash for block_hash, block_id in self._block_of.items()}:
            raise IntegrityError("the prefix cache's two maps contradict each other")
        if not self._inexact.keys() <= self._block_of.keys():
            raise IntegrityError("a block counts as rounded that is not in the prefix cache")
        self.retained.check(self._block_of)
        claimed = {block_id for block_id in free if self._hash_of.get(block_id, b"") in self.claims.hashes}
        if claimed != set(self._claimed):
            raise IntegrityError("the free blocks that requests claim are not those that are evicted last")
        if any(self._hash_of.get(block_id, b"") not in self._retained_hashes for block_id in self._set_aside):
            raise IntegrityError("a block is set aside that is not retained")
        if any(self._hash_of.get(block_id, b"") in self._retained_hashes for block_id in self._expendable):
            raise IntegrityError("a retained block is among those that are evicted first")

    def _take(self) -> int:
        block_id = self._next_free()
        self._forget(block_id)
        self._refs[block_id] = 1
        self.highest_used = max(self.highest_used, block_id)
        return block_id

    def _next_free(self) -> int:
        """Take the free block that is worth least out of its queue."""
        if self._expendable:
            return self._expendable.popitem(last=False)[0]
        while True:
            while self._cached:
                block_id, _ = self._cached.popitem(last=False)
                if self._hash_of[block_id] not in self._retained_hashes:
                    return block_id
                self._set_aside[block_id] = None
            if self._set_aside:
                self.num_retained_evicted += 1
                return self._set_aside.popitem(last=False)[0]
            self._put_back(self.claims.drop_oldest())  # one of them holds a free block, as there is no other

    def _pop_free(self, block_id: int) -> None:
        for queue in (self._cached, self._set_aside, self._claimed, self._expendable):
            if queue.pop(block_id, 0) is None:
                return

    def _lapse(self, block_hash: bytes) -> None:
        """Let a block be evicted that is not retained any more; unless it has been set aside, it has kept its place."""
        block_id = self._block_of.get(block_hash)
        if block_id is not None and self._set_aside.pop(block_id, 0) is None:
            self._expendable[block_id] = None

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self._inexact.pop(block_hash, None)
            if block_hash in self._retained_hashes:
                self.retained.forget(block_hash)
            if self.log is not None:
                self.log.note(block_hash, stored=False)
            if self.events is not None:
                self.events.remove(block_hash)
