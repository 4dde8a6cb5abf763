"""The scheduler decides which sequences compute how many tokens in the next step.

There are no phases: a sequence's computed tokens chase its known tokens under the step's token budget. A decode row, a chunk of a
prompt, the rest of a prompt after a cached prefix and a recomputation after preemption are scheduled alike. Draft tokens follow
the known ones, where they take neither budget nor blocks from another sequence.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from pdmesh.engine.kv_cache.block_manager import BlockCopy, BlockManager
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.scheduler.tpot_limiter import TpotLimiter
from pdmesh.engine.speculation.draft import NOTHING, Draft
from pdmesh.step_sharing import MUCH_SHORTER, OLDEST_SHARE

# Prompts share a step's tokens: the oldest prompt has at least half of them, the other half goes to prompts that are much shorter
# than it, the shortest first; what these leave goes to all prompts in order of arrival.
#
#     oldest  8190 ████████████░░  ← a prompt of 4 tokens that arrives behind it is computed in the next step
#
# So a short prompt waits for a few steps, not for a long prompt to end; a long one takes at most twice its time alone; prompts of
# like lengths are computed one after the other, which ends the first of them sooner. Shortest remaining time first is best for
# the mean (Schrage 1968); the share of the oldest keeps it from starving.


# One block in this many is kept free for growth when a request is admitted beside running sequences.
BLOCKS_PER_SPARE = 64
# So many followers of other prompts are passed over in the queue, at most, to find one that can begin.
MOST_PASSED_OVER = 64
# In a step with prompts, draft tokens get at most this part of the budget: one token in so many.
PROMPTS_PER_DRAFT = 8


# Prompts that begin alike and are here at the same time: one computes the blocks that they share, the others wait for it.
#
#     arrives   A  ██████████ system prompt ▒▒ question        leads: it computes
#               B  ·········· system prompt ▒▒ question        follows: its next block is the one that A computes next
#               C  ░░░ another prompt                          neither
#
# A prompt follows while the first block that it lacks is one that a prompt before it is to compute next. So it gets blocks as
# they are published, goes on by itself where the prompts part, and begins at once if its leader is gone. It waits for no longer
# than the blocks would have taken it, since its leader has its turn first; but a step at least, so that a short common beginning
# is not worth it.

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


# The plan of a step.


@dataclass(frozen=True)
class ScheduledSequence:
    """Describe a sequence's part of this step: its next `num_tokens` tokens, and the draft tokens after its last known token."""

    sequence: Sequence
    num_tokens: int
    copies: tuple[BlockCopy, ...] = ()
    draft: Draft = NOTHING  # empty unless it reaches the sequence's end

    @property
    def num_rows(self) -> int:
        """Return the number of tokens that the model computes."""
        return self.num_tokens + len(self.draft)

    @property
    def reaches_end(self) -> bool:
        """Return whether the step computes all known tokens. Call it before the step's tokens count as computed."""
        return self.sequence.num_remaining == self.num_tokens

    @property
    def num_prompt_rows(self) -> int:
        """Return how many of its tokens need a row of the model's output besides those that draw: those whose states are pooled
        into a mean, or after which log-probabilities of the prompt are wanted."""
        return self.num_tokens - self.reaches_end if self.sequence.needs_prompt_rows else 0


class SchedulerOutput:
    """Hold one step's work, in the order in which it was planned. While the same sequences decode a token each, the steps behind
    it have the same plan (`num_repeats`): what a step keeps for the next one, it keeps by the plan."""

    def __init__(self, budget: int, num_prompt_rows_left: int = 1) -> None:
        """`num_prompt_rows_left`: rows of logits that tokens of prompts may have which do not draw."""
        self.budget = budget
        self.num_prompt_rows_left = num_prompt_rows_left
        self.preempted: set[Sequence] = set()
        self.num_repeats = 0  # steps before this one that had the same plan
        self._pieces: dict[Sequence, ScheduledSequence] = {}

    @property
    def pieces(self) -> list[ScheduledSequence]:
        return list(self._pieces.values())

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._pieces)

    @property
    def num_tokens(self) -> int:
        if self.num_repeats:
            return len(self._pieces)
        return sum([piece.num_rows for piece in self._pieces.values()])

    @property
    def is_decode(self) -> bool:
        """Return whether each sequence decodes: one choice, whose last token is computed, without a copy and without a draft.
        Call it before the step's tokens count as computed."""
        return all(
            piece.num_tokens == 1
            and piece.sequence.is_decoding
            and piece.sequence.is_going_on
            and len(piece.sequence.choices) == 1
            and not (piece.copies or piece.draft)
            for piece in self._pieces.values()
        )

    def chunk(self, sequence: Sequence, most: int) -> int:
        """Return how many of the sequence's tokens the step can take, `most` at most."""
        num_tokens = min(sequence.num_remaining, most)
        return min(num_tokens, self.num_prompt_rows_left) if sequence.needs_prompt_rows else num_tokens

    def add(self, piece: ScheduledSequence) -> None:
        self._pieces[piece.sequence] = piece
        self.budget -= piece.num_rows
        if piece.sequence.needs_prompt_rows:
            self.num_prompt_rows_left -= piece.num_tokens

    def piece_of(self, sequence: Sequence) -> ScheduledSequence | None:
        return self._pieces.get(sequence)

    def put(self, piece: ScheduledSequence) -> None:
        """Replace the entry of the same sequence."""
        self.budget += self._pieces[piece.sequence].num_rows - piece.num_rows
        self._pieces[piece.sequence] = piece

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a preempted sequence: its tokens, and copies into blocks that it no longer has."""
        self.preempted.add(sequence)
        piece = self._pieces.pop(sequence, None)
        self.budget += piece.num_rows if piece else 0


class Scheduler:
    """Keep two lists in order of arrival: running sequences have blocks, waiting sequences have none."""

    def __init__(
        self, allocator: BlockManager, max_num_batched_tokens: int, pacer: TpotLimiter | None = None, max_logits_rows: int = 256
    ) -> None:
        """`max_logits_rows`: rows of logits that a step has room for."""
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.in_step: frozenset[Sequence] = frozenset()  # those that the step under way computes, or may plan to compute
        self.num_preemptions = 0
        self._equal = EqualPrompts(allocator)
        self._repeatable: tuple[SchedulerOutput, list[Sequence]] | None = None  # the last plan, if it may be the next one, too
        self._allocator = allocator
        self._pacer = pacer or TpotLimiter()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_logits_rows = max_logits_rows

    def run(self, sequence: Sequence) -> None:
        """Add a sequence that has its blocks to the running ones."""
        insort(self.running, sequence, key=_turn)

    def wait(self, sequence: Sequence) -> None:
        """Add a sequence without blocks to the waiting ones."""
        insort(self.waiting, sequence, key=_turn)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is in a list. The caller frees its blocks."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def schedule(self, now_ns: int = 0, drafts: Mapping[Sequence, Draft] | None = None) -> SchedulerOutput:
        """Schedule decode rows first, then chunks of prompts: of those much shorter than the oldest one (a part of the step),
        then of running sequences and of waiting ones, in order of arrival.

        `drafts`: drafts of running sequences. An empty plan means that no sequence can advance until blocks are released.
        """
        if not drafts and (repeated := self._repeated(now_ns)) is not None:
            return repeated
        plan = self._new_plan(now_ns, drafts or {})
        is_repeatable = bool(self.running) and not self.waiting and plan.sequences == self.running and plan.is_decode
        self._repeatable = (plan, plan.sequences) if is_repeatable else None
        return plan

    def _repeated(self, now_ns: int) -> SchedulerOutput | None:
        """Return the last plan where a new one would be the same: the same sequences decode, into blocks of their own, and no
        request waits. None: plan anew."""
        if self._repeatable is None or self.waiting:
            return None
        plan, sequences = self._repeatable
        if sequences != self.running or not self._allocator.extend_decoding(sequences):
            return None
        self._pacer.start(sequences, now_ns)
        plan.num_repeats += 1
        return plan

    def _new_plan(self, now_ns: int, drafts: Mapping[Sequence, Draft]) -> SchedulerOutput:
        decoding = [sequence for sequence in self.running if sequence.is_going_on]
        plan = SchedulerOutput(self._max_num_batched_tokens, max(1, self._max_logits_rows - len(decoding)))
        self._equal = EqualPrompts(self._allocator)
        prompts = self._equal.leading(sequence for sequence in self.running if not sequence.is_going_on)
        self._plan_all(decoding, plan)
        self._plan_drafts(drafts, plan, beside_prompts=bool(prompts or self.waiting))
        self._limit_prompts(plan, decoding, prompts or self.waiting, now_ns)
        self._plan_short_prompts(prompts, plan)
        self._plan_all([prompt for prompt in prompts if plan.piece_of(prompt) is None], plan)
        if not plan.preempted or not plan.pieces:  # a sequence that was just preempted must not preempt the next one
            self._plan_waiting(plan)
        return plan

    @property
    def has_followers(self) -> bool:
        """Return whether the last plan left out sequences that wait for another's blocks, and may go on behind that step."""
        return self._equal.has_followers

    def num_spare_blocks(self, num_reserved: int) -> int:
        """Return the blocks to leave free when a request is admitted, so that it does not at once preempt a sequence that runs or
        is about to run."""
        spare = max(1, self._allocator.pool.num_total // BLOCKS_PER_SPARE)
        return min(len(self.running) + num_reserved, spare)

    def trim(self, plan: SchedulerOutput | None = None) -> bool:
        """Take back the blocks that running sequences got for drafts and do not need any more; return False if there were none.
        It is called only when a sequence lacks a block, because the next step would use the same blocks again.

        `plan`: the step that is being planned. Without one, sequences of a step under way keep what it may write."""
        is_trimmed = False
        for sequence in self.running:
            if plan is None and sequence in self.in_step:
                continue
            piece = plan.piece_of(sequence) if plan is not None else None
            num_planned = sequence.num_computed + piece.num_rows if piece else 0
            is_trimmed |= self._allocator.trim(sequence, max(sequence.num_tokens, num_planned))
        return is_trimmed

    @property
    def blocks_for_preempted(self) -> int:
        """Return the blocks that preempted sequences need to continue: they come before new reservations."""
        return sum(self._allocator.num_blocks_for(s.num_tokens) for s in self.waiting if s.was_preempted)

    def _plan_all(self, sequences: list[Sequence], plan: SchedulerOutput) -> None:
        for sequence in sequences:
            if sequence not in plan.preempted:
                self._plan_running(sequence, plan)

    def _limit_prompts(self, plan: SchedulerOutput, decoding: list[Sequence], prompts: list[Sequence], now_ns: int) -> None:
        """Limit prompts to the part of the step that decoding sequences can spare."""
        self._pacer.start(decoding, now_ns)
        if prompts:
            num_guessed = sum([len(piece.draft) for piece in plan.pieces])
            most = self._pacer.prompt_tokens(decoding, prompts[0], now_ns, num_guessed)
            plan.budget = plan.budget if most is None else min(plan.budget, most)

    def _plan_short_prompts(self, prompts: list[Sequence], plan: SchedulerOutput) -> None:
        """Plan prompts that are much shorter than the oldest one within the part of the step that it leaves to them."""
        oldest = min((*prompts[:1], *self.waiting[:1]), key=_turn, default=None)
        if oldest is None or plan.preempted:
            return
        share = plan.budget - min(oldest.num_remaining, math.ceil(OLDEST_SHARE * plan.budget))
        most = MUCH_SHORTER * oldest.num_remaining
        shorter = sorted((each for each in (*prompts, *self.waiting) if each.num_remaining <= most), key=_shortest)
        for sequence in shorter[:MOST_PASSED_OVER]:
            if share > 0 and self._equal.follows(sequence):
                continue
            if share <= 0 or plan.preempted or not self._overtake(sequence, plan):
                return
            before = plan.budget
            self._plan_running(sequence, plan, share)
            share -= before - plan.budget

    def _overtake(self, sequence: Sequence, plan: SchedulerOutput) -> bool:
        """Return whether a sequence has blocks, or gets them now: a waiting one leaves those that the head of the queue needs."""
        head = self.waiting[0] if self.waiting else sequence
        if sequence not in self.waiting:
            return True
        num_needed = 0 if sequence is head else self._allocator.num_blocks_for(head.num_tokens)
        if not self._admit(sequence, plan, keep_free=num_needed):
            return False
        self.waiting.remove(sequence)
        self._equal.lead(sequence)
        self.run(sequence)
        return True

    def _plan_running(self, sequence: Sequence, plan: SchedulerOutput, most: int | None = None) -> None:
        num_tokens = plan.chunk(sequence, plan.budget if most is None else most)
        if num_tokens and self._make_room(sequence, num_tokens, plan):
            plan.add(ScheduledSequence(sequence, num_tokens, self._allocator.extend(sequence, num_tokens)))

    def _plan_drafts(self, drafts: Mapping[Sequence, Draft], plan: SchedulerOutput, *, beside_prompts: bool) -> None:
        """Plan drafts after all known tokens of the decoding sequences, so that a draft takes neither budget nor a block from any
        of them; each of them may need a block in the next step. Prompts leave drafts a small part of the step."""
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

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: SchedulerOutput) -> bool:
        """Trim, then preempt the sequence that arrived last until there are blocks; return False if that was `sequence`
        itself."""
        # The count is repeated: once a victim releases a shared block, this sequence may own it alone and need no copy.
        while self._allocator.num_missing(sequence, num_tokens) > self._allocator.pool.num_free:
            if self.trim(plan):
                continue
            # A prefill_only sequence, whose KV a push reads, is never preempted; it has all its blocks, so `sequence` is not one.
            victim = next(other for other in reversed(self.running) if not other.group.request.prefill_only)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, plan: SchedulerOutput) -> None:
        self.running.remove(victim)
        victim.num_to_restore = max(victim.num_to_restore, victim.num_computed)
        self._allocator.release(victim)
        victim.was_preempted = True
        self._equal.withdraw(victim)
        victim.paced_from_ns = 0  # its schedule begins anew: others do not make up for its time without blocks
        self.wait(victim)
        plan.withdraw(victim)
        self.num_preemptions += 1

    def _plan_waiting(self, plan: SchedulerOutput) -> None:
        for sequence in self._admit_waiting(plan):
            if num_tokens := plan.chunk(sequence, plan.budget):
                plan.add(ScheduledSequence(sequence, num_tokens))

    def _admit_waiting(self, plan: SchedulerOutput) -> Iterator[Sequence]:
        # Strictly in order: none overtakes a request that lacks blocks, else small ones would keep a large one out for ever.
        # What another prompt computes is no such lack.
        index = 0
        while plan.budget > 0 and index < min(len(self.waiting), MOST_PASSED_OVER):
            sequence = self.waiting[index]
            if index and not self._equal.may_look_on:
                return
            if self._equal.follows(sequence):
                index += 1
            elif plan.chunk(sequence, plan.budget) and self._admit(sequence, plan):
                del self.waiting[index]
                self._equal.lead(sequence)
                self.run(sequence)
                yield sequence
            else:
                return

    def _admit(self, sequence: Sequence, plan: SchedulerOutput, keep_free: int = 0) -> bool:
        admit = partial(self._allocator.admit, sequence, keep_free=self.num_spare_blocks(0) + keep_free)
        return admit() or (self.trim(plan) and admit())


def _shortest(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.num_remaining, *sequence.turn


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn
