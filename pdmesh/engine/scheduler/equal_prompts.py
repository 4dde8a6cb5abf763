"""Prompts that begin alike and are here at the same time: one computes the blocks that they share, the others wait for it.

    arrives   A  ██████████ system prompt ▒▒ question        leads: it computes
              B  ·········· system prompt ▒▒ question        follows: its next block is the one that A computes next
              C  ░░░ another prompt                          neither

A prompt follows while the first block that it lacks is one that a prompt before it is to compute next. So it gets blocks as they
are published, goes on by itself where the prompts part, and begins at once if its leader is gone. It waits for no longer than
the blocks would have taken it, since its leader has its turn first; but a step at least, so that a short common beginning is not
worth it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.engine.kv_cache.block_manager import BlockManager
from pdmesh.engine.scheduler.sequence import Sequence

MIN_SHARED_TOKENS = 64
"""Prompts that have less in common, what is cached included, do not wait for each other."""


MOST_HASHED = 4096
"""Blocks that are hashed in a plan to find followers in the queue: those behind them are looked at in the next one."""


class EqualPrompts:
    """Tell leaders from followers while a step is planned. Make one for each plan."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._leaders: dict[Sequence, int] = {}  # with the block up to which a follower has to be equal
        self._num_hashed = blocks.num_hashed
        self.has_followers = False

    def leading(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the prompts of running sequences, in their order, without those that follow another. Blocks that have been
        published since they got theirs take the place of those that they would have computed."""
        leading = []
        for sequence in running:
            keeps_blocks = sequence.group.request.prefill_only  # a push reads them as they were told to it
            if not keeps_blocks:
                self._blocks.adopt(sequence)
            if keeps_blocks or not self.follows(sequence):
                self.lead(sequence)
                leading.append(sequence)
        return leading

    @property
    def may_look_on(self) -> bool:
        """Return whether the queue may be looked through further in this plan."""
        return self._blocks.num_hashed - self._num_hashed < MOST_HASHED

    def follows(self, sequence: Sequence) -> bool:
        """Return whether another prompt computes the first block that this one lacks."""
        for leader, index in self._leaders.items():
            if leader is not sequence and self._blocks.have_in_common(sequence, leader, index):
                self.has_followers = True
                return True
        return False

    def lead(self, sequence: Sequence) -> None:
        """Note a prompt that computes from now on."""
        found = self._blocks.next_block(sequence)
        if found is not None:
            self._leaders[sequence] = max(found, self._blocks.num_blocks_for(MIN_SHARED_TOKENS) - 1)

    def withdraw(self, sequence: Sequence) -> None:
        """Forget a leader that is preempted: no other waits for it."""
        self._leaders.pop(sequence, None)
