"""Slots for tokens that are guessed."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.engine.kv_cache.block_manager import BlockAllocator
from pdmesh.engine.scheduler.sequence import Sequence

# room(sequence, num_tokens, num_kept): the slots of the sequence's first `num_tokens` tokens are there, and those that are not
# computed yet are its own to write to. False: they are not, and nothing changed; then nothing is drafted. `num_kept`: blocks that
# shall stay free if one is taken.
Room = Callable[[Sequence, int, int], bool]


def room_in(allocator: BlockAllocator, num_running: Callable[[], int] = lambda: 0) -> Room:
    """Where each of the running sequences, if somebody knows how many they are, finds another block as well: for a draft nobody
    is preempted, now or in the step that verifies it.

    A block that others share is the scheduler's to copy, in the step that computes the sequence's next token.
    """

    def make_room(sequence: Sequence, num_tokens: int, num_kept: int) -> bool:
        num_new = max(0, allocator.num_blocks_for(num_tokens) - len(sequence.block_ids))
        num_shared = allocator.num_missing(sequence, num_tokens - sequence.num_computed) - num_new
        if num_shared or (num_new and num_new + max(num_kept, num_running()) > allocator.pool.num_free):
            return False
        return allocator.grow(sequence, num_tokens)

    return make_room
