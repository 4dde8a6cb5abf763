"""A modelled worker: the steps of `pdmesh/engine/scheduler/scheduler.py`, each with the time that a latency model predicts.

  command ─► waits for the end of the step ─► reserve, run_local, start, prefill, let_go ─► the next step

A step holds a token of every decoding row (with speculation more: `Drafting`) and chunks of prompts under the token budget, as
much of them as the rows' TPOT budgets leave: in order of arrival, but prompts much shorter than the oldest one share its steps.
Without a prompt only contexts change: then all steps before the next row's end are one event, which a new command cuts short.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Names
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from pdmesh.planning.latency_model import Drafts
from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.workers.batch import Drafting, Paces, Rows, StepsUnderWay, StepTimes, prompts_s
from pdmesh.simulator.workers.kv_room import KvRoom, Sequence, TierRoom
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.step_sharing import MUCH_SHORTER, OLDEST_SHARE, PACE_TARGET

# The figures that a modelled worker reports: those of `pdmesh/engine/scheduler/stats.py`. Pure.


@dataclass(slots=True)
class Counters:
    """Count since the start."""

    num_steps: int = 0
    num_prefilled: int = 0
    num_generated: int = 0
    num_preemptions: int = 0


class Census(NamedTuple):
    """Hold a worker's state at one moment."""

    num_decoding: int
    num_prefilling: int
    num_waiting: int
    num_reserved: int
    num_held: int
    num_free_blocks: int
    num_waiting_tokens: int
    decode_context: int
    num_oldest_tokens: int


class Figures(NamedTuple):
    """Hold figures as of `taken_at` (simulated seconds), the end of its latest step. Those that count tokens, steps and
    preemptions do so from its start; the rest is as `protos/pdmesh/v1/worker.proto` says of the same names."""

    taken_at: float
    num_running: int
    num_waiting: int
    num_reserved: int
    num_held: int
    num_free_blocks: int
    num_total_blocks: int
    num_waiting_tokens: int
    num_prefilling: int
    num_decoding: int
    decode_context: int
    pace_s: float
    slack_s: float
    num_steps: int
    num_prefilled_tokens: int
    num_generated_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_oldest_tokens: int
    prefill: bool = False
    decode: bool = False
    draining: bool = False
    drafts: Drafts | None = None  # of its latest step; None: it has decoded nothing


def census_of(worker: ModelledWorker) -> Census:
    """Return the current state."""
    num_waiting, rows = len(worker.waiting), worker.rows
    return Census(
        len(rows.members),
        len(worker.prompts) + num_waiting,
        num_waiting,
        len(worker.reserved),
        len(worker.held),
        worker.room.num_free,
        worker.num_to_prefill,
        rows.context,
        worker.num_oldest_tokens,
    )


def figures_of(
    worker: ModelledWorker, now: float, *, prefill: bool = False, decode: bool = False, draining: bool = False
) -> Figures:
    """Return the figures. Steps that have ended by `now` count, what has come since the last of them does not: the engine counts
    at the end of a step, then takes new requests. So a prompt is not reported before the end of the first step that holds some of
    it."""
    course, rows, counters = worker.course, worker.rows, worker.counters
    num_steps = 0 if course is None or course.pieces else course.steps_by(now)
    taken_at = now if course is None else course.began_s + course.lasts_s(num_steps)
    census = worker.before if course is not None and not num_steps and worker.before is not None else census_of(worker)
    decode_context = census.decode_context + num_steps * census.num_decoding
    grown = rows.growth(num_steps) - rows.next_growth if num_steps > 1 else 0
    pace_s, slack_s = _pace(worker, decode_context, num_steps, taken_at)
    return Figures(
        taken_at,
        census.num_decoding + census.num_prefilling - census.num_waiting,
        census.num_waiting,
        census.num_reserved,
        census.num_held,
        census.num_free_blocks - grown,
        worker.spec.num_blocks,
        census.num_waiting_tokens,
        census.num_prefilling,
        census.num_decoding,
        decode_context,
        pace_s,
        slack_s,
        counters.num_steps + num_steps,
        counters.num_prefilled,
        counters.num_generated + num_steps * census.num_decoding,
        worker.room.num_hit_tokens,
        counters.num_preemptions,
        census.num_oldest_tokens,
        prefill,
        decode,
        draining,
        worker.drafting.latest if worker.drafting.has_decoded else None,
    )


def _pace(worker: ModelledWorker, decode_context: int, num_steps: int, at_s: float) -> tuple[float, float]:
    """Return the budget of the tightest row; without one, the least budget that any row here can have, and no slack."""
    if not worker.spec.keeps_pace:
        return 0.0, 0.0
    num_rows = len(worker.rows)
    decode_s = worker.spec.speed.decode_s(num_rows, decode_context)
    drafts_s = worker.drafting.latest.added_s(worker.spec.speed, num_rows)
    pace = worker.paces.tightest(decode_s, worker.rows.step + num_steps, at_s, drafts_s)
    if pace is not None:
        return pace.pace_s, pace.slack_s
    least_s = (decode_s + drafts_s) / worker.drafting.latest.tokens_per_row
    return PACE_TARGET * min([goal_s for goal_s in worker.goals if goal_s > least_s], default=0.0), 0.0


BLOCKS_PER_SPARE = 64
"""Blocks of which one is kept free for growth when something is admitted beside running sequences
(pdmesh/engine/scheduler/scheduler.py)."""

Command = Callable[[float], None]
_turn: Callable[[Sequence], int] = attrgetter("turn")
_shortest: Callable[[Sequence], tuple[int, int]] = attrgetter("num_remaining", "turn")


class ModelledWorker:
    """Model a worker. `name` is its address; `seed` draws the noise of `spec`; `tier_bytes` of KV fit beneath its pool. Requests
    come in as commands: `call` runs them between two steps, as the engine does."""

    def __init__(self, name: str, spec: WorkerSpec, events: EventQueue, seed: int = 0, tier_bytes: float = 0.0) -> None:
        self.name, self.spec = name, spec
        self.counters = Counters()
        self.is_dead = False
        self.num_changes = 0  # of anything in its figures
        block_bytes = spec.prefix_tokens * spec.kv_bytes_per_token
        tiers = TierRoom(int(tier_bytes / block_bytes)) if tier_bytes and block_bytes else None
        self.rows, self.room = Rows(spec.block_size), KvRoom(spec.num_blocks, spec.block_size, spec.prefix_tokens, tiers)
        self.num_sends = 0  # to workers that fetch from it
        self.fetches: dict[tuple[int, ...], list[Callable[[], None]]] = {}  # under way, with the prompts that wait for the same
        self.paces, self.drafting = Paces(), Drafting(spec.drafts)
        self.prompts: list[Sequence] = []  # they have blocks, in order of arrival
        self.waiting: list[Sequence] = []  # they have none
        self.reserved: dict[Sequence, None] = {}
        self.held: dict[Sequence, None] = {}
        self.num_to_prefill = 0
        self.goals: dict[float, int] = {}
        self.course: StepsUnderWay | None = None
        self.before: Census | None = None  # its state at the last command, before its present steps
        self._times = StepTimes(spec.between_s, spec.noise, spec.noise_lasts_s, f"{seed}/{name}")
        self._events = events
        self._commands: list[Command] = []
        self._version = 0
        self._num_arrivals = 0

    # Requests to it

    def call(self, command: Command) -> None:
        """Run the command now if no step is under way, else at its end; it receives the time at which it runs."""
        if self.is_dead:
            return
        self._commands.append(command)
        if self.course is None:
            self._begin(self._events.now)
        elif len(self._commands) == 1:
            self._cut_short(self._events.now)

    def take_in(self, names: Names[int]) -> int:
        """Add prefix blocks that came from elsewhere; return how many it lacked, 0 where there is no room for them."""
        if self.is_dead:
            return 0
        self.num_changes += 1
        return self.room.take_in(names)

    def stop(self, now: float) -> None:
        """Die: what its rows have drawn by now is counted, and nothing happens here any more."""
        if self.course is not None and not self.course.pieces:
            self._advance(min(self.course.steps_by(now), self.course.num_steps - 1))
        for sequence in list(self.rows.members):
            self.rows.leave(sequence)
        self.course, self._version, self.is_dead = None, self._version + 1, True

    @property
    def is_empty(self) -> bool:
        """Return whether it has no sequence and no pending command."""
        return not (self.rows.members or self.prompts or self.waiting or self.reserved or self.held or self._commands)

    # Commands, run by `call` only

    def reserve(self, sequence: Sequence) -> bool:
        """Take blocks and a place for a request whose prompt is computed later; False: no capacity now."""
        if not self._has_seat():
            return False
        owed = sum([self.room.blocks_for(other.num_tokens) for other in self.waiting if other.was_preempted])
        if not self.room.admit(sequence, self._spare(len(self.reserved)) + owed):
            return False
        self._enter(sequence)
        self.reserved[sequence] = None
        return True

    def run_local(self, sequence: Sequence) -> None:
        """Compute here what the reservation lacks."""
        del self.reserved[sequence]
        self.num_to_prefill += sequence.num_remaining
        insort(self.prompts, sequence, key=_turn)

    def start(self, sequence: Sequence, num_left: int) -> None:
        """Continue a reservation whose KV has arrived with a token drawn elsewhere; `num_left` at least 1."""
        del self.reserved[sequence]
        self.room.publish(sequence)
        sequence.num_computed = sequence.num_tokens
        sequence.num_left = num_left
        self._decode(sequence)

    def prefill(self, sequence: Sequence) -> bool:
        """Compute a prompt for another worker, in its turn; False: all places are taken."""
        if not self._has_seat():
            return False
        self._enter(sequence)
        self.num_to_prefill += sequence.num_tokens
        self.waiting.append(sequence)
        return True

    def let_go(self, sequence: Sequence) -> None:
        """Release a reservation, or a prompt that was computed for another worker; idempotent."""
        for place in (self.reserved, self.held):
            if sequence in place:
                del place[sequence]
                self._forget(sequence)

    # Steps

    def _begin(self, now: float) -> None:
        """Run the commands, then plan the next step or steps."""
        self.num_changes += 1
        self.before = census_of(self) if self._commands else None
        while self._commands:
            commands, self._commands = self._commands, []
            for command in commands:
                command(now)
        if self.rows.members or self.prompts or self.waiting:
            self.course = self._plan(now)
            if self.course is not None:
                self._times.apply(self.course)
                self._arm(now + self.course.lasts_s(self.course.num_steps))

    def _arm(self, end_s: float) -> None:
        self._version += 1
        self._events.at(end_s, self._end, self._version)

    def _cut_short(self, now: float) -> None:
        """End the steps with the current one: a command has come."""
        course = self.course
        if course is None or course.num_steps == 1 or course.pieces:
            return
        num_steps = min(course.num_steps, course.steps_by(now) + 1)
        if num_steps < course.num_steps:
            course.num_steps = num_steps
            self._arm(max(now, course.began_s + course.lasts_s(num_steps)))

    def _end(self, version: int) -> None:
        course = self.course
        if version != self._version or course is None:
            return
        now, self.course = self._events.now, None
        self._count(course)
        done = self._advance(course.num_steps) if self.rows.members else []
        for sequence, num_tokens in course.pieces:
            sequence.num_computed += num_tokens
            sequence.compute_s += now - course.began_s
            if sequence.num_computed == sequence.num_tokens:
                self._computed(sequence, now)
        for sequence in done:
            sequence.watcher.on_end(sequence, now)
        self._begin(now)

    def _count(self, course: StepsUnderWay) -> None:
        num_prefilled = sum([num_tokens for _, num_tokens in course.pieces])
        self.num_to_prefill -= num_prefilled
        self.counters.num_steps += course.num_steps
        self.counters.num_prefilled += num_prefilled
        self.counters.num_generated += course.num_steps * len(self.rows.members)

    def _advance(self, num_steps: int) -> list[Sequence]:
        """Advance the rows; return those that ended, with their blocks released."""
        if num_steps > 1:
            self.room.grow(self.rows.growth(num_steps) - self.rows.next_growth)  # the first took its blocks when it was planned
        done = self.rows.advance(num_steps)
        for sequence in done:
            self._stop_decoding(sequence)
            self._forget(sequence)
        return done

    def _stop_decoding(self, sequence: Sequence) -> None:
        """Take it out of the rows: its blocks become its own to release."""
        self.paces.leave(sequence)
        shared = len(sequence.shared) * (self.spec.prefix_tokens // self.spec.block_size)
        sequence.num_blocks = self.room.blocks_for(sequence.num_tokens - 1) - shared

    def _computed(self, sequence: Sequence, now: float) -> None:
        """Draw its next token: all its tokens are computed."""
        self.prompts.remove(sequence)
        self.room.publish(sequence)
        sequence.num_left -= 1
        self.counters.num_generated += 1
        if sequence.prefill_only:
            self.held[sequence] = None
        elif sequence.num_left:
            self._decode(sequence)
        else:
            self._forget(sequence)
        sequence.watcher.on_prompt(sequence, now)

    def _decode(self, sequence: Sequence) -> None:
        sequence.num_tokens += 1
        self.rows.enter(sequence)
        self.paces.enter(sequence, self.rows.step, self._events.now)

    def _plan(self, now: float) -> StepsUnderWay | None:
        """Plan the next steps; None: nothing can run until blocks are released."""
        rows, speed = self.rows, self.spec.speed
        has_preempted = self._make_room()
        num_rows = len(rows.members)
        plain_s = decode_s = speed.fixed_s + speed.per_sequence_s * num_rows + speed.per_context_token_s * rows.context
        if num_rows:
            decode_s = self.drafting.step_s(speed, num_rows, plain_s, self.spec.max_num_batched_tokens)
        per_step = self.paces.tokens_per_step = self.drafting.latest.tokens_per_row
        most = self._prompt_tokens(plain_s, decode_s - plain_s, now)
        pieces = self._plan_prompts(most, has_preempted=has_preempted)
        free = self.room.num_free + rows.next_growth  # the first step's blocks are taken
        if pieces or (most is not None and per_step > 1):
            num_tokens = self.drafting.num_tokens(rows, free)
            step_s = decode_s - self.drafting.unused_s(speed, num_rows, num_tokens) + prompts_s(speed, pieces)
            return StepsUnderWay(now, num_tokens, step_s / num_tokens, pieces=pieces, tokens_per_step=num_tokens)
        if not num_rows:
            return None
        # what rows leave to prompts is another thing in each step
        is_alone = most is not None or (has_preempted and bool(self.waiting))
        num_steps = 1 if is_alone else rows.steps_within(free, rows.steps_to_end())
        more_s = speed.per_context_token_s * num_rows / per_step
        return StepsUnderWay(now, num_steps, decode_s / per_step, more_s, tokens_per_step=per_step)

    def _make_room(self) -> bool:
        """Free blocks for the next token of every row, preempting the latest arrivals if needed; return whether any was
        preempted."""
        rows, num_preemptions = self.rows, self.counters.num_preemptions
        while rows.members and rows.next_growth > self.room.num_free:
            self._preempt(self._latest())
        if rows.members:
            self.room.grow(rows.next_growth)
        return self.counters.num_preemptions > num_preemptions

    def _latest(self) -> Sequence:
        """Return the latest running sequence, of which there is one; never one whose KV is for another worker."""
        running = [self.rows.latest(), *(sequence for sequence in self.prompts if not sequence.prefill_only)]
        return max([sequence for sequence in running if sequence is not None], key=_turn)

    def _preempt(self, victim: Sequence) -> None:
        """Preempt it: it releases its blocks and waits in its turn, to be recomputed."""
        self.counters.num_preemptions += 1
        if victim in self.rows.members:
            self.rows.leave(victim)
            self._stop_decoding(victim)
        else:
            self.prompts.remove(victim)
            self.num_to_prefill -= victim.num_remaining
        self.room.release(victim)
        victim.num_computed, victim.was_preempted = 0, True
        self.num_to_prefill += victim.num_tokens
        insort(self.waiting, victim, key=_turn)

    def _prompt_tokens(self, decode_s: float, drafts_s: float, now: float) -> int | None:
        """Return how many prompt tokens the rows leave to the next step; None: there are no prompts, or no rows with a pace."""
        first = self.prompts[0] if self.prompts else self.waiting[0] if self.waiting else None
        if first is None or not self.rows.members or not self.spec.keeps_pace:
            return None
        return self.paces.prompt_tokens(first, self.spec.speed, decode_s, self.rows.step, now, drafts_s)

    def _plan_prompts(self, most: int | None, *, has_preempted: bool) -> list[tuple[Sequence, int]]:
        """Return chunks for the next step, `most` tokens together: of prompts much shorter than the oldest one, then of all in
        order of arrival. Waiting sequences get blocks in their turn, unless one that was just preempted would get them."""
        num_rows = int(len(self.rows.members) * self.drafting.latest.computed_per_row)
        pieces, budget = list[tuple[Sequence, int]](), self.spec.max_num_batched_tokens - num_rows
        budget = budget if most is None else min(budget, most)
        if budget <= 0:
            return pieces
        if not has_preempted:
            pieces = self._short_pieces(budget)
        budget -= sum([num_tokens for _, num_tokens in pieces])
        planned = {sequence for sequence, _ in pieces}
        admit = not (has_preempted and bool(self.rows.members or self.prompts))
        for sequence in self._in_turn(admit=admit):
            if sequence in planned:
                continue
            num_tokens = min(sequence.num_remaining, budget)
            pieces.append((sequence, num_tokens))
            budget -= num_tokens
            if budget <= 0:
                break
        return pieces

    def _short_pieces(self, budget: int) -> list[tuple[Sequence, int]]:
        """Return chunks of prompts that are much shorter than the oldest one, within the part of the step that it leaves them."""
        oldest, pieces = self._oldest(), list[tuple[Sequence, int]]()
        if oldest is None:
            return pieces
        share = budget - min(oldest.num_remaining, math.ceil(OLDEST_SHARE * budget))
        most = MUCH_SHORTER * oldest.num_remaining
        for sequence in sorted([each for each in (*self.prompts, *self.waiting) if each.num_remaining <= most], key=_shortest):
            if share <= 0 or not self._overtake(sequence):
                break
            pieces.append((sequence, min(sequence.num_remaining, share)))
            share -= pieces[-1][1]
        return pieces

    def _overtake(self, sequence: Sequence) -> bool:
        """Return whether it has blocks, or gets them now: a waiting one leaves those that the head of the queue needs."""
        if sequence not in self.waiting:
            return True
        head = self.waiting[0]
        num_needed = 0 if sequence is head else self.room.blocks_for(head.num_tokens)
        if not self.room.admit(sequence, self._spare(0) + num_needed):
            return False
        self.waiting.remove(sequence)
        insort(self.prompts, sequence, key=_turn)
        self.num_to_prefill -= sequence.num_cached
        return True

    def _oldest(self) -> Sequence | None:
        return min((*self.prompts[:1], *self.waiting[:1]), key=_turn, default=None)

    @property
    def num_oldest_tokens(self) -> int:
        """Return the tokens that the oldest prompt lacks; 0 without one."""
        oldest = self._oldest()
        return 0 if oldest is None else oldest.num_remaining

    def _in_turn(self, *, admit: bool) -> Iterator[Sequence]:
        """Yield those that have blocks, then those that get some now."""
        yield from list(self.prompts)
        while admit and self.waiting and self.room.admit(self.waiting[0], self._spare(0)):
            sequence = self.waiting.pop(0)
            insort(self.prompts, sequence, key=_turn)
            self.num_to_prefill -= sequence.num_cached
            yield sequence

    # Capacity

    def _spare(self, num_reserved: int) -> int:
        """Return the blocks to leave free on admission, so that it does not at once preempt what runs or is about to."""
        num_running = len(self.rows.members) + len(self.prompts)
        return min(num_running + num_reserved, max(1, self.spec.num_blocks // BLOCKS_PER_SPARE))

    def _has_seat(self) -> bool:
        num_seats = len(self.rows.members) + len(self.prompts) + len(self.waiting) + len(self.reserved)
        return num_seats < self.spec.max_num_seqs

    def _enter(self, sequence: Sequence) -> None:
        self._num_arrivals += 1
        sequence.turn, sequence.where = self._num_arrivals, self.name
        self.goals[sequence.goal_s] = self.goals.get(sequence.goal_s, 0) + 1

    def _forget(self, sequence: Sequence) -> None:
        self.room.release(sequence)
        self.goals[sequence.goal_s] -= 1
        if not self.goals[sequence.goal_s]:
            del self.goals[sequence.goal_s]
