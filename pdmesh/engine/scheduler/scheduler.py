"""Who computes how many tokens in the next step.

There are no phases: a sequence's computed tokens chase its known tokens under the step's token budget. A decode row, a chunk of a
prompt, what a cached prefix left over and a recomputation after preemption are the same assignment. Drafted tokens follow the
known ones, where nobody has to give anything up for them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from pdmesh.engine.kv_cache.block_manager import BlockAllocator, BlockCopy
from pdmesh.engine.scheduler.pacing import Pacer
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import NOTHING, Draft

# Of so many blocks one is kept free for growth when something new is admitted beside running sequences.
BLOCKS_PER_SPARE = 64
# Of a step beside prompts one such part at most is for guesses.
PROMPTS_PER_DRAFT = 8


@dataclass(frozen=True)
class Piece:
    """The next `num_tokens` tokens of a sequence, to be computed in this step, and those that are guessed to follow its last."""

    sequence: Sequence
    num_tokens: int
    copies: tuple[BlockCopy, ...] = ()
    draft: Draft = NOTHING  # empty unless the piece reaches the end

    @property
    def num_rows(self) -> int:
        """Tokens that the model computes."""
        return self.num_tokens + len(self.draft)

    @property
    def reaches_end(self) -> bool:
        """All known tokens are computed after the step. Meaningful before the step's tokens are counted as computed."""
        return self.sequence.num_remaining == self.num_tokens


class Plan:
    """One step's work, in the order in which it was planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.preempted: set[Sequence] = set()
        self._pieces: dict[Sequence, Piece] = {}

    @property
    def pieces(self) -> list[Piece]:
        return list(self._pieces.values())

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_rows for piece in self._pieces.values())

    def add(self, piece: Piece) -> None:
        self._pieces[piece.sequence] = piece
        self.budget -= piece.num_rows

    def piece_of(self, sequence: Sequence) -> Piece | None:
        return self._pieces.get(sequence)

    def put(self, piece: Piece) -> None:
        """In place of the piece of the same sequence."""
        self.budget += self._pieces[piece.sequence].num_rows - piece.num_rows
        self._pieces[piece.sequence] = piece

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence was preempted: its tokens, and copies into blocks that it no longer has, are off."""
        self.preempted.add(sequence)
        piece = self._pieces.pop(sequence, None)
        self.budget += piece.num_rows if piece else 0


class Scheduler:
    """Two lists in order of arrival: running sequences have blocks, waiting ones have none."""

    def __init__(self, allocator: BlockAllocator, max_num_batched_tokens: int, pacer: Pacer | None = None) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self._allocator = allocator
        self._pacer = pacer or Pacer()
        self._max_num_batched_tokens = max_num_batched_tokens

    def run(self, sequence: Sequence) -> None:
        """Takes a sequence that has its blocks."""
        insort(self.running, sequence, key=_turn)

    def wait(self, sequence: Sequence) -> None:
        """Takes a sequence that has no blocks."""
        insort(self.waiting, sequence, key=_turn)

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence if it is here. Its blocks are the caller's to free."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def schedule(self, now_ns: int = 0, drafts: Mapping[Sequence, Draft] | None = None) -> Plan:
        """Decode rows first, then chunks of running sequences, then whoever waits, each in order of arrival.

        `drafts`: of running sequences. A plan without pieces means that nothing can be done until somebody releases blocks.
        """
        plan = Plan(self._max_num_batched_tokens)
        decoding = [sequence for sequence in self.running if sequence.is_going_on]
        prompts = [sequence for sequence in self.running if not sequence.is_going_on]
        self._plan_all(decoding, plan)
        self._plan_drafts(drafts or {}, plan, beside_prompts=bool(prompts or self.waiting))
        self._leave_pace(plan, decoding, prompts or self.waiting, now_ns)
        self._plan_all(prompts, plan)
        if not plan.preempted or not plan.pieces:  # who was just preempted must not push out the next one
            self._plan_waiting(plan)
        return plan

    def num_spare_blocks(self, num_reserved: int) -> int:
        """Blocks to leave free when a request is admitted, so that it does not push out at once who runs or is about to."""
        spare = max(1, self._allocator.pool.num_total // BLOCKS_PER_SPARE)
        return min(len(self.running) + num_reserved, spare)

    def trim(self, plan: Plan | None = None) -> bool:
        """Takes back the blocks that running sequences got for guesses and need no more, now that somebody lacks one; False:
        there were none. In the next step the same blocks would serve again, so nobody takes them back before."""
        is_trimmed = False
        for sequence in self.running:
            piece = plan.piece_of(sequence) if plan is not None else None
            num_planned = sequence.num_computed + piece.num_rows if piece else 0
            is_trimmed |= self._allocator.trim(sequence, max(sequence.num_tokens, num_planned))
        return is_trimmed

    @property
    def num_owed_blocks(self) -> int:
        """Blocks that preempted sequences need to go on: they come before new reservations."""
        return sum(self._allocator.num_blocks_for(s.num_tokens) for s in self.waiting if s.was_preempted)

    def _plan_all(self, sequences: list[Sequence], plan: Plan) -> None:
        for sequence in sequences:
            if sequence not in plan.preempted:
                self._plan_running(sequence, plan)

    def _leave_pace(self, plan: Plan, decoding: list[Sequence], prompts: list[Sequence], now_ns: int) -> None:
        """Prompts get no more of the step than those that decode can spare."""
        self._pacer.start(decoding, now_ns)
        if prompts:
            num_guessed = sum([len(piece.draft) for piece in plan.pieces])
            most = self._pacer.prompt_tokens(decoding, prompts[0], now_ns, num_guessed)
            plan.budget = plan.budget if most is None else min(plan.budget, most)

    def _plan_running(self, sequence: Sequence, plan: Plan) -> None:
        num_tokens = min(sequence.num_remaining, plan.budget)
        if num_tokens and self._make_room(sequence, num_tokens, plan):
            plan.add(Piece(sequence, num_tokens, self._allocator.extend(sequence, num_tokens)))

    def _plan_drafts(self, drafts: Mapping[Sequence, Draft], plan: Plan, *, beside_prompts: bool) -> None:
        """After all known tokens of those that decode, so that a guess takes neither budget nor a block from any of them; each
        of them may need a block in the next step. Prompts leave guesses a small part of the step."""
        most = self._max_num_batched_tokens // PROMPTS_PER_DRAFT if beside_prompts else plan.budget
        for sequence, draft in drafts.items():
            piece = plan.piece_of(sequence)
            if piece is None or not piece.reaches_end:
                continue
            num_rows = piece.num_tokens + min(len(draft), plan.budget, most)
            if self._allocator.num_missing(sequence, num_rows) + len(self.running) <= self._allocator.pool.num_free:
                copies = self._allocator.extend(sequence, num_rows)
                most -= num_rows - piece.num_tokens
                plan.put(replace(piece, copies=piece.copies + copies, draft=draft.first(num_rows - piece.num_tokens)))

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Trims, then preempts the latest arrived until there is room; False if that was the sequence itself."""
        # Counted anew each time: a victim that shared a block leaves it to this sequence alone, without a copy.
        while self._allocator.num_missing(sequence, num_tokens) > self._allocator.pool.num_free:
            if self.trim(plan):
                continue
            # Never one whose KV is being read by somebody else; it has all the blocks it wants, so `sequence` is none.
            victim = next(other for other in reversed(self.running) if not other.group.request.prefill_only)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        self.running.remove(victim)
        victim.num_to_restore = max(victim.num_to_restore, victim.num_computed)
        self._allocator.release(victim)
        victim.was_preempted = True
        victim.paced_from_ns = 0  # it begins anew: those beside it owe it nothing for the time without blocks
        self.wait(victim)
        plan.withdraw(victim)
        self.num_preemptions += 1

    def _plan_waiting(self, plan: Plan) -> None:
        for sequence in self._admit_waiting(plan):
            plan.add(Piece(sequence, min(sequence.num_remaining, plan.budget)))

    def _admit_waiting(self, plan: Plan) -> Iterator[Sequence]:
        # Strictly in order: a large request is not overtaken for ever by small ones.
        while self.waiting and plan.budget and self._admit(self.waiting[0], plan):
            sequence = self.waiting.pop(0)
            self.run(sequence)
            yield sequence

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        admit = partial(self._allocator.admit, sequence, keep_free=self.num_spare_blocks(0))
        return admit() or (self.trim(plan) and admit())


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn
