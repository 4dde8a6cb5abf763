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


class EqualPrompts:
    """Tell leaders from followers while a step is planned. Make one for each plan."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._leaders: dict[bytes, Sequence] = {}  # by the block that each computes next
        self._withdrawn: set[Sequence] = set()
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

    def follows(self, sequence: Sequence) -> bool:
        """Return whether another prompt computes the first block that this one lacks."""
        leader = self._leaders.get(self._blocks.next_hash(sequence)) if self._leaders else None
        if leader is None or leader is sequence or leader in self._withdrawn:
            return False
        follows = self._blocks.num_shared_tokens(sequence, leader) >= MIN_SHARED_TOKENS
        self.has_followers |= follows
        return follows

    def lead(self, sequence: Sequence) -> None:
        """Note a prompt that computes from now on."""
        next_hash = self._blocks.next_hash(sequence)
        if next_hash:
            self._leaders.setdefault(next_hash, sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Forget a leader that is preempted: no other waits for it."""
        self._withdrawn.add(sequence)
