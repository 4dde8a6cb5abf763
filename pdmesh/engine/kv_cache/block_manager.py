"""The block manager gives sequences their blocks: cached prefix first, growth, copy-on-write, publishing computed blocks.

Every block id in a `Sequence.block_ids` or in `pinned` is one reference in the pool, and only this module changes any.

`BlockManager.lock` guards both, the scheduler's lists and the table of requests. An engine's methods take it (engine.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import eq

from pdmesh.engine.errors import InvalidRequest
from pdmesh.engine.kv_cache.block_events import BlockEventLog, stored_block
from pdmesh.engine.kv_cache.block_pool import BlockPool, num_blocks_for
from pdmesh.engine.kv_cache.published_blocks import PublishedBlocks, names_of
from pdmesh.engine.scheduler.sequence import Sequence

HashBlock = Callable[[bytes, Tokens[int]], bytes]


@dataclass(frozen=True)
class BlockCopy:
    """Copy the content of one block, all layers, before the step writes."""

    source: int
    target: int


class BlockManager:
    """Manage the pool for sequences. `hash_block(parent, token_ids)` chains the hashes of full blocks."""

    def __init__(self, pool: BlockPool, block_size: int, hash_block: HashBlock, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.lock = threading.RLock()
        self.num_prefix_hit_tokens = 0
        self.num_hashed = 0  # blocks
        self.pinned: dict[str, tuple[int, ...]] = {}  # blocks that other workers and tiers read, by the reading
        self.published: PublishedBlocks | None = None  # logs what is published, if it is set
        self._block_size = block_size
        self._hash_block = hash_block
        self._prefix_caching = prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self._block_size)

    def num_tokens_of(self, num_blocks: int) -> int:
        return num_blocks * self._block_size

    def admit(self, sequence: Sequence, *, keep_free: int) -> bool:
        """Give blocks for all known tokens, shared ones for a cached prefix; False, and none, if fewer than `keep_free` stay
        free."""
        cached = self._find_prefix(sequence)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(cached)
        if num_new + self.pool.num_free_among(cached) + keep_free > self.pool.num_free:
            return False
        self.pool.acquire(cached)  # before allocate(), which might evict them
        sequence.block_ids = cached + self._allocate(num_new)
        sequence.num_computed = sequence.num_cached = len(cached) * self._block_size
        sequence.num_published = len(cached)
        self._note_exactness(sequence)
        self.num_prefix_hit_tokens += sequence.num_computed
        self._note_used(sequence)
        self.pool.unclaim(sequence.group.request.request_id)  # it holds them now
        return True

    def next_block(self, sequence: Sequence) -> int | None:
        """Return the index of the full block that a prompt computes next, and then publishes; None: there is none, or it is there
        already."""
        num_blocks = self._num_to_find(sequence)
        if sequence.block_ids:
            index = sequence.num_computed // self._block_size
        else:
            index = len(self.pool.find(self._hashes(sequence, num_blocks)))
        return index if index < num_blocks and not self.pool.find([self._hash(sequence, index)]) else None

    def have_in_common(self, sequence: Sequence, other: Sequence, index: int) -> bool:
        """Return whether two prompts have their first blocks in common, up to block `index`."""
        if index >= min(self._num_to_find(sequence), self._num_to_find(other)):
            return False
        return all(self._hash(sequence, each) == self._hash(other, each) for each in (0, index))  # 0: most differ there already

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        return sequence.block_hashes[index] if index < len(sequence.block_hashes) else self._hashes(sequence, index + 1)[index]

    def adopt(self, sequence: Sequence) -> None:
        """Let a sequence share blocks that others have published since it got its own, instead of computing its own. What its
        request claimed has served its purpose then."""
        self._adopt(sequence)
        self.pool.unclaim(sequence.group.request.request_id)

    def _adopt(self, sequence: Sequence) -> None:
        first, rest = divmod(sequence.num_computed, self._block_size)
        num_blocks = min(self._num_to_find(sequence), len(sequence.block_ids))
        if rest or first >= num_blocks or not self.pool.find(self._hashes(sequence, first + 1)[first:]):
            return
        found = self.pool.find(self._hashes(sequence, num_blocks)[first:])
        end = first + len(found)
        self.pool.acquire(found)
        self.pool.release(sequence.block_ids[first:end])
        sequence.block_ids[first:end] = found
        num_tokens = len(found) * self._block_size
        sequence.num_computed += num_tokens
        sequence.num_cached += num_tokens
        sequence.num_published = end
        self.num_prefix_hit_tokens += num_tokens
        if sequence.group.clock is not None:
            num_rounded = sum(map(self.pool.is_rounded, sequence.block_hashes[first:end])) * self._block_size
            sequence.group.clock.adopted(sequence.num_computed, num_tokens=num_tokens, num_rounded_tokens=num_rounded)
        was_exact = sequence.is_exact
        self._note_exactness(sequence)
        sequence.is_exact = sequence.is_exact and was_exact
        self._note_used(sequence, first)

    def _note_exactness(self, sequence: Sequence) -> None:
        """Record how much of its cached prefix is rounded."""
        hashes = [] if self.pool.is_all_exact else sequence.block_hashes[: sequence.num_published]
        sequence.num_rounded = sum(map(self.pool.is_rounded, hashes)) * self._block_size
        sequence.is_exact = all(map(self.pool.is_exact, hashes))
        sequence.is_private = False

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the free blocks that `num_tokens` more tokens take: new ones at the end, and copies of shared ones they write
        to."""
        num_blocks = self.num_blocks_for(sequence.num_computed + num_tokens)
        return max(0, num_blocks - len(sequence.block_ids)) + len(self._shared_to_write(sequence, num_tokens))

    def extend(self, sequence: Sequence, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Make the next `num_tokens` tokens writable. num_missing() blocks must be free. Make the returned copies before the
        write."""
        copies = tuple(self._make_own(sequence, index) for index in self._shared_to_write(sequence, num_tokens))
        self.grow(sequence, sequence.num_computed + num_tokens)
        return copies

    def extend_decoding(self, sequences: Tokens[Sequence]) -> bool:
        """Make the next token of each sequence writable, as `extend` does; False, and nothing changed, where one of them has not
        just one token to compute, would write into a shared block, or where there are too few free blocks."""
        growing = []
        for sequence in sequences:
            if sequence.num_remaining != 1:
                return False
            index = sequence.num_computed // self._block_size
            if index == len(sequence.block_ids):
                growing.append(sequence)
            elif self.pool.ref_count(sequence.block_ids[index]) > 1:
                return False
        blocks = self.pool.allocate(len(growing)) if growing else []
        if blocks is None:
            return False
        for sequence, block_id in zip(growing, blocks, strict=True):
            sequence.block_ids.append(block_id)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Append blocks until they hold `num_tokens` tokens in all; False, and nothing changed, if there are too few."""
        blocks = self.pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(sequence.block_ids)))
        sequence.block_ids += blocks or []
        return blocks is not None

    def trim(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give back the blocks behind those that hold its first `num_tokens` tokens; False: there are none."""
        num_blocks = self.num_blocks_for(num_tokens)
        self.pool.release(surplus := sequence.block_ids[num_blocks:])
        del sequence.block_ids[num_blocks:]
        return bool(surplus)

    def publish(self, sequence: Sequence, *, is_rounded: bool = False) -> None:
        """Publish blocks that are computed, full and not yet published to the prefix cache. `is_rounded`: a tier has rounded
        their KV."""
        num_full = sequence.num_computed // self._block_size
        if not self._prefix_caching or sequence.is_private or num_full <= sequence.num_published:
            return
        hashes = self._hashes(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            if not self.pool.publish(sequence.block_ids[index], hashes[index]):
                continue
            if is_rounded or not sequence.is_exact:
                self.pool.note_inexact(hashes[index], is_rounded=is_rounded)
            if self.pool.events is not None:
                self._note_stored(self.pool.events, sequence, index)
        self._note_published(sequence, sequence.num_published, num_full)
        sequence.num_published = num_full

    def _note_published(self, sequence: Sequence, first: int, end: int) -> None:
        """Log blocks `first` to `end` of a sequence, for tiers."""
        if self.published is not None:
            retention = sequence.group.retention
            keep_s = 0.0 if retention is None or retention.final else retention.seconds
            self.published.note(names_of(sequence.group.request.block_root, sequence.block_hashes[:end], first), keep_s)

    def _note_used(self, sequence: Sequence, first: int = 0) -> None:
        """Log the blocks that a sequence has found, from block `first` on, for tiers."""
        if self.published is not None and sequence.num_published > first:
            self.published.note_used(sequence.block_hashes[first : sequence.num_published])

    def _note_stored(self, events: BlockEventLog, sequence: Sequence, index: int) -> None:
        start, hashes = index * self._block_size, sequence.block_hashes
        tokens = sequence.tokens(start, start + self._block_size)
        events.store(stored_block(sequence.group.request, hashes[index], hashes[index - 1] if index else None, tokens))

    def withdraw(self, sequence: Sequence) -> None:
        """Let no other prompt find the blocks of a sequence whose logits are not finite: their content may be NaN, too."""
        self.pool.withdraw(sequence.block_ids)
        if self.published is not None:
            self.published.withdraw(names_of(sequence.group.request.block_root, sequence.block_hashes))

    def hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of all full blocks of a sequence's known tokens."""
        return self._hashes(sequence, sequence.num_tokens // self._block_size)

    def num_equal(self, sequence: Sequence, first: int, hashes: Tokens[bytes]) -> int:
        """Return how many of some blocks that follow each other are those of a sequence from its block `first` on."""
        if len(sequence.block_hashes) <= first or sequence.block_hashes[first] != hashes[0]:  # one not looked at yet has none
            return 0
        num_blocks = min(first + len(hashes), sequence.num_tokens // self._block_size)
        ours = islice(self._hashes(sequence, num_blocks), first, None)
        return sum(1 for _ in takewhile(bool, map(eq, ours, hashes)))

    def pin(self, pin_id: str, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """Take a reference of the longest published and exact beginning of a chain, which stays until `unpin`; return the blocks.
        Raises InvalidRequest for an id that is in use."""
        if pin_id in self.pinned:
            raise InvalidRequest(f"pin_id: {pin_id!r} is in use")
        block_ids = tuple(self.pool.find(takewhile(self.pool.is_exact, hashes)))
        self.pool.acquire(block_ids)
        self.pinned[pin_id] = block_ids
        return block_ids

    def pin_any(self, pin_id: str, hashes: Iterable[bytes]) -> tuple[int | None, ...]:
        """Take a reference of each of these blocks that is published, which stays until `unpin`; return the blocks, None for the
        others. Raises InvalidRequest for an id that is in use."""
        if pin_id in self.pinned:
            raise InvalidRequest(f"pin_id: {pin_id!r} is in use")
        found = tuple(next(iter(self.pool.find([block_hash])), None) for block_hash in hashes)
        self.pinned[pin_id] = block_ids = tuple(block_id for block_id in found if block_id is not None)
        self.pool.acquire(block_ids)
        return found

    def chain(self, root: bytes, tokens: Tokens[int]) -> tuple[bytes, ...]:
        """Return the hashes of the full blocks of some tokens."""
        hashes: list[bytes] = []
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            hashes.append(self._hash_block(hashes[-1] if hashes else root, tokens[start : start + self._block_size]))
        return tuple(hashes)

    def unpin(self, pin_id: str) -> None:
        """Give the references of a pin back; idempotent."""
        self.pool.release(self.pinned.pop(pin_id, ()))

    def part(self, trunk: Sequence) -> list[Sequence]:
        """Return the trunk's choices as sequences that share its blocks. The trunk then holds none."""
        branches = trunk.part()
        for branch in branches:
            self.pool.acquire(branch.block_ids)
        self._give_back(trunk)
        return branches

    def release(self, sequence: Sequence) -> None:
        """Give its references back. What it published can be found until it is evicted, and is retained if its request asks for
        that."""
        retention = sequence.group.retention
        if retention is not None and not retention.final:
            self.pool.retain(retention, sequence.block_hashes[: sequence.num_published])
            self._note_published(sequence, 0, sequence.num_published)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.num_published = 0

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        return self.pool.find(self._hashes(sequence, self._num_to_find(sequence)))

    def _num_to_find(self, sequence: Sequence) -> int:
        """Return how many blocks of a sequence may come from the prefix cache."""
        # Never the last token: its logits have to be computed. Where all tokens need a row of output, all are computed.
        may_find = self._prefix_caching and not sequence.needs_prompt_rows
        return (sequence.num_tokens - 1) // self._block_size if may_find else 0

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        hashes = sequence.block_hashes
        self.num_hashed += max(0, num_blocks - len(hashes))
        while len(hashes) < num_blocks:
            start = len(hashes) * self._block_size
            parent = hashes[-1] if hashes else sequence.group.request.block_root
            hashes.append(self._hash_block(parent, sequence.tokens(start, start + self._block_size)))
        return hashes[:num_blocks]

    def _shared_to_write(self, sequence: Sequence, num_tokens: int) -> list[int]:
        start = sequence.num_computed // self._block_size
        end = min(len(sequence.block_ids), self.num_blocks_for(sequence.num_computed + num_tokens))
        return [index for index in range(start, end) if self.pool.ref_count(sequence.block_ids[index]) > 1]

    def _make_own(self, sequence: Sequence, index: int) -> BlockCopy:
        source = sequence.block_ids[index]
        [target] = self._allocate(1)
        self.pool.release([source])
        sequence.block_ids[index] = target
        return BlockCopy(source, target)

    def _allocate(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        assert blocks is not None, f"{count} blocks were promised but {self.pool.num_free} are free"
        return blocks
