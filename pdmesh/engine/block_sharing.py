"""Blocks of the prefix cache that move: to other workers and to tiers beneath the pool, and back from them.

    here    claim ──► expect ──► reserved, written by the other worker ──► take_in: published, and free to be found ──► release
    there   pin ──► read ──► unpin
    tier    take_published ──► pin_any ──► copied to the tier ──► unpin; back as from another worker

Both sides name blocks by the hashes of the prompt's chain, so that a block which went away meanwhile is missed, and never another
one is read. Under the engine's lock, so also while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pdmesh.engine.errors import InvalidRequest
from pdmesh.engine.interface import ExpectedBlocks, ReservedBlocks
from pdmesh.engine.kv_cache.block_events import BlockEventLog
from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.kv_cache.published_blocks import BlockName, PublishedBlocks
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.scheduler.requests import RequestTable
from pdmesh.engine.scheduler.sequence import Phase
from pdmesh.engine.scheduler.sequence import Sequence as EngineSequence

FREE_SHARE = 0.25
"""The share of the pool that must stay free beside blocks that are expected."""
MOST_PROMPTS = 64
"""So many prompts under way are looked through, at most, for blocks that another worker asks for."""


class BlockSharing:
    """Take in blocks from other workers, and pin those that others read."""

    def __init__(
        self, table: RequestTable, blocks: BlockManager, reserve: Callable[[EngineRequest], ReservedBlocks | None]
    ) -> None:
        self._table = table
        self._blocks = blocks
        self._reserve = reserve

    def expect(self, request: EngineRequest) -> ExpectedBlocks | None:
        """Reserve blocks for the tokens of a request, whole blocks, which another worker has; None: no room now, or all are here.

        Raises InvalidRequest, RequestTooLarge or DuplicateRequest."""
        with self._blocks.lock:
            if not self._has_room(len(request.prompt)):
                return None
            reserved = self._reserve(request)
            if reserved is None:
                return None
            self._blocks.num_prefix_hit_tokens -= reserved.num_cached_tokens  # it counts when it spares a computation
            [sequence] = self._table.find(request.request_id, Phase.RESERVED).sequences
            missing = tuple(self._blocks.hashes(sequence)[sequence.num_published :])
            if self._blocks.pool.find(missing):  # the last block, which no prompt may find for its own last token
                self._table.release(request.request_id)
                return None
            return ExpectedBlocks(reserved, missing)

    def _has_room(self, num_tokens: int) -> bool:
        """Return whether so much is free that what is fetched, which could be computed as well, is in no request's way."""
        pool = self._blocks.pool
        return pool.num_free - self._blocks.num_blocks_for(num_tokens) >= pool.num_total * FREE_SHARE

    def take_in(self, request_id: str, num_tokens: int, *, is_rounded: bool = False) -> None:
        """Publish what has arrived, the KV of the first `num_tokens` tokens; `is_rounded`: a tier has rounded it. The request
        stays, for its caller to release.

        Raises UnknownRequest, InvalidState or InvalidRequest (more than it was reserved for)."""
        with self._blocks.lock:
            [sequence] = self._table.find(request_id, Phase.RESERVED).sequences
            if not sequence.num_computed <= num_tokens <= sequence.num_tokens:
                raise InvalidRequest(f"num_tokens: {num_tokens} is not in {sequence.num_computed} to {sequence.num_tokens}")
            sequence.num_computed = num_tokens
            self._blocks.publish(sequence, is_rounded=is_rounded)

    def claim(self, request: EngineRequest) -> None:
        """Evict the blocks of a request's tokens after all others, those that come too, until it is admitted or released."""
        hashes = self._blocks.chain(request.block_root, request.history)
        with self._blocks.lock:
            self._blocks.pool.claim(request.request_id, hashes)

    def pin(self, pin_id: str, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """Pin the longest beginning of these blocks that is here and exact, until `unpin`; return their ids. Raises
        InvalidRequest for a pin that is there already."""
        hashes = tuple(hashes)
        with self._blocks.lock:
            pinned = self._blocks.pin(pin_id, hashes)
            if self._blocks.published is not None:
                self._blocks.published.note_used(hashes[: len(pinned)])
            return pinned

    def coming(self, first: int, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return what will be computed until the most of some blocks are here that prompts under way bring: each prompt's tokens,
        from the first of two numbers to the second, in the order of turns. The blocks follow each other in a prompt from block
        `first` on. Empty: no more come."""
        with self._blocks.lock:
            most, needed, before = len(self._blocks.pool.find(hashes)), list[tuple[int, int]](), list[tuple[int, int]]()
            for sequence in self._prompts():
                num_blocks = self._blocks.num_equal(sequence, first, hashes)
                if num_blocks > most and sequence.is_exact:
                    end = self._blocks.num_tokens_of(first + num_blocks)
                    most, needed = num_blocks, [*before, (min(sequence.num_computed, end), end)]
                before.append((sequence.num_computed, sequence.num_tokens))
            return needed

    def to_compute(self) -> list[tuple[int, int]]:
        """Return the tokens of prompts that are here and not computed, from the first of two numbers to the second."""
        with self._blocks.lock:
            return [(sequence.num_computed, sequence.num_tokens) for sequence in self._prompts()]

    def _prompts(self) -> list[EngineSequence]:
        active = (group for group in self._table if group.phase is Phase.ACTIVE)
        prompts = (sequence for group in active for sequence in group.sequences if not sequence.is_going_on)
        return sorted(prompts, key=lambda each: each.turn)[:MOST_PROMPTS]

    def unpin(self, pin_id: str) -> None:
        """Let go of pinned blocks; idempotent."""
        with self._blocks.lock:
            self._blocks.unpin(pin_id)

    # For tiers.

    def lacking(self, root: bytes, tokens: Sequence[int]) -> tuple[int, tuple[bytes, ...]]:
        """Return how many of the leading blocks of some tokens are here, and the hashes of all full blocks."""
        hashes = self._blocks.chain(root, tokens)
        with self._blocks.lock:
            return len(self._blocks.pool.find(hashes)), hashes

    def pin_any(self, pin_id: str, hashes: Iterable[bytes]) -> tuple[int | None, ...]:
        """Pin those of these blocks that are here, until `unpin`; return their ids, None for the others. Raises InvalidRequest
        for a pin that is there already."""
        with self._blocks.lock:
            return self._blocks.pin_any(pin_id, hashes)

    def watch_published(self, max_blocks: int) -> PublishedBlocks:
        """Log the names of blocks that are published from now on, at most so many. Call it before the first request."""
        self._blocks.published = PublishedBlocks(max_blocks)
        return self._blocks.published

    def take_published(self, most: int) -> list[tuple[BlockName, float]]:
        """Return blocks that were published since the last call, the oldest first, with the seconds for which they are wanted."""
        with self._blocks.lock:
            return [] if self._blocks.published is None else self._blocks.published.take(most)

    def take_used(self) -> list[tuple[bytes, ...]]:
        """Return the hashes of the blocks that were found here since the last call, by prompts and other workers."""
        with self._blocks.lock:
            return [] if self._blocks.published is None else self._blocks.published.take_used()

    def take_withdrawn(self) -> list[BlockName]:
        """Return blocks that were withdrawn since the last call."""
        with self._blocks.lock:
            return [] if self._blocks.published is None else self._blocks.published.take_withdrawn()

    def note_tiers(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Tell the log of the prefix cache what tiers hold now, and what they hold no more."""
        with self._blocks.lock:
            log = self._blocks.pool.log
            if log is not None:
                for block_hash in stored:
                    log.note_tier(block_hash, stored=True)
                for block_hash in evicted:
                    log.note_tier(block_hash, stored=False)

    def watch(self) -> BlockEventLog:
        """Return a log of what the prefix cache gains and loses from now on, with token ids. Call it before the first request,
        and only where the log is read."""
        self._blocks.pool.events = BlockEventLog(self._blocks.lock)
        return self._blocks.pool.events
