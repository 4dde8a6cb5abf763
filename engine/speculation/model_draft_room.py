"""Slots for tokens that are guessed."""

from __future__ import annotations

from collections.abc import Callable

from engine.allocator import BlockAllocator
from engine.sequence import Sequence

# room(sequence, num_tokens): the slots of the sequence's first `num_tokens` tokens are there, and those that are not computed yet
# are its own to write to. False: they are not, and nothing changed; then nothing is drafted.
Room = Callable[[Sequence, int], bool]


def room_in(allocator: BlockAllocator, num_kept: Callable[[], int] = lambda: 0) -> Room:
    """As long as `num_kept()` blocks stay free: for a draft nobody is preempted, now or a moment later.

    A block that others share is the scheduler's to copy, in the step that computes the sequence's next token.
    """

    def make_room(sequence: Sequence, num_tokens: int) -> bool:
        num_new = max(0, allocator.num_blocks_for(num_tokens) - len(sequence.block_ids))
        num_shared = allocator.num_missing(sequence, num_tokens - sequence.num_computed) - num_new
        if num_shared or (num_new and num_new + num_kept() > allocator.pool.num_free):
            return False
        return allocator.grow(sequence, num_tokens)

    return make_room
