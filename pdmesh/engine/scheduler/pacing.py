"""How much of prompts a step may hold beside sequences that were promised a pace. Pure.

A sequence with a TPOT objective is to get its tokens at a pace that keeps it with something to spare. From its first step here
it has a schedule; what it is ahead of that is its slack, and steps that hold prompts may use it up bit by bit:

    step <= pace + slack / SPREAD            pace = TARGET · objective; the least of all sequences that decode

So prompts are computed as fast as everybody's objective allows, and what has no objective waits for whole chunks as ever. Slack
is measured, not predicted: a step that took longer than was thought is made up for by the next ones.

A step that keeps what was guessed gives a sequence several tokens: it is that much ahead. So slack grows until steps are longer
by as many paces, and a sequence that gets two tokens a step has its steps two paces apart while prompts are there. Which
objectives can be kept, and what of a step is left for prompts where somebody is behind, is judged by each sequence's tokens per
step.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from typing import NamedTuple

from pdmesh.engine.scheduler.sequence import Sequence

TARGET = 0.9
"""Of the objective: the rest is for what a step's time does not contain, as the hand-off and the way to the client."""
SPREAD = 8
"""Steps over which slack is used up."""
MAX_SHARE = 0.75
"""Of the time, for steps without prompts: else a sequence behind its schedule would let nobody begin. But an objective that can
still be met comes first."""
LEAST_TOKENS = 8
"""Of prompts in a step, whatever anybody was promised."""
PRIOR_STEPS = 8
"""Steps of one token each that a sequence is taken to have behind it, before anything is known of its guesses."""
FORGIVEN = 32
"""Paces that a sequence can be behind. What a machine that stalled took from it beyond that is lost, not owed by prompts."""


class StepCost(NamedTuple):
    """What a step takes, in seconds: this much, and so much for each prompt token, for each token that those attend to, for each
    sequence that decodes and for each token that these attend to."""

    fixed_s: float
    per_prefill_token_s: float
    per_prefill_context_s: float
    per_sequence_s: float
    per_context_token_s: float


class Pace(NamedTuple):
    """Of the sequence that leaves least room: a token every `pace_s`, ahead of that by `slack_s` (behind: below zero).
    `tokens_per_step`: that it has had so far, with what was guessed of it and kept."""

    pace_s: float
    slack_s: float
    tokens_per_step: float = 1.0

    @property
    def step_s(self) -> float:
        """How long the next step may take."""
        return self.pace_s + self.slack_s / SPREAD


class Pacer:
    """`cost` is told by whoever watches the steps; while it is None, or nobody was promised anything, steps are full."""

    def __init__(self, *, is_on: bool = True) -> None:
        """`is_on` False: nobody is promised anything."""
        self._is_on = is_on
        self.cost: StepCost | None = None

    def start(self, decoding: Iterable[Sequence], now_ns: int) -> None:
        """Begins the schedules of those that have none; forgives those that are too far behind."""
        for sequence in decoding:
            goal_s = sequence.group.request.tpot_goal_s
            if not goal_s or not self._is_on:
                continue
            if not sequence.paced_from_ns:
                sequence.paced_from_ns, sequence.paced_from_token, sequence.num_paced_steps = now_ns, len(sequence.output), 0
            sequence.num_paced_steps += 1
            excess_s = -FORGIVEN * TARGET * goal_s - _pace(sequence, now_ns).slack_s
            if excess_s > 0:
                sequence.paced_from_ns += int(1e9 * excess_s)

    def tightest(self, decoding: Sequence_[Sequence], now_ns: int) -> Pace | None:
        """None: nobody that decodes was promised anything that can be kept: an objective below a step without prompts cannot."""
        decode_s = self._decode_s(decoding)
        paces = [_pace(sequence, now_ns) for sequence in decoding if sequence.paced_from_ns]
        possible = [pace for pace in paces if pace.pace_s * pace.tokens_per_step > TARGET * decode_s]
        return min(possible, key=lambda pace: pace.step_s) if possible else None

    def promised_s(self, sequences: Iterable[Sequence], decoding: Sequence_[Sequence]) -> float:
        """The least pace that any of these has or will have beside `decoding`; 0: none was promised one that can be kept."""
        if not self._is_on:
            return 0.0
        decode_s, goals_s = self._decode_s(decoding), [(each, each.group.request.tpot_goal_s) for each in sequences]
        return TARGET * min([goal_s for each, goal_s in goals_s if goal_s * _tokens_per_step(each) > decode_s], default=0.0)

    def prompt_tokens(self, decoding: list[Sequence], next_prompt: Sequence, now_ns: int, num_guessed: int = 0) -> int | None:
        """Of prompts, the next of which is `next_prompt`, this step may hold at most so many; None: as many as fit.
        `num_guessed`: tokens that are computed beside the known ones of `decoding`."""
        cost, pace = self.cost, self.tightest(decoding, now_ns)
        if cost is None or pace is None:
            return None
        decode_s = self._decode_s(decoding) + cost.per_sequence_s * num_guessed
        least_s = min(decode_s * (1 - MAX_SHARE) / MAX_SHARE, pace.tokens_per_step * pace.pace_s / TARGET - decode_s)
        return max(LEAST_TOKENS, _fitting(cost, next_prompt, max(least_s, pace.step_s - decode_s)))

    def _decode_s(self, decoding: Sequence_[Sequence]) -> float:
        """A step of these alone; 0 while nobody knows."""
        if self.cost is None:
            return 0.0
        context = sum([sequence.num_tokens for sequence in decoding])
        return self.cost.fixed_s + self.cost.per_sequence_s * len(decoding) + self.cost.per_context_token_s * context


def _fitting(cost: StepCost, prompt: Sequence, room_s: float) -> int:
    """Tokens of `prompt`, and of those behind it, that take so long. What they attend to grows with their number."""
    num_tokens = num_behind = 0.0
    for _ in range(2):
        token_s = cost.per_prefill_token_s + cost.per_prefill_context_s * (prompt.num_computed + num_behind)
        if token_s <= 0:
            return prompt.num_remaining
        num_tokens = room_s / token_s
        num_behind = min(num_tokens, prompt.num_remaining) / 2
    return int(num_tokens)


def _pace(sequence: Sequence, now_ns: int) -> Pace:
    pace_s = TARGET * sequence.group.request.tpot_goal_s
    spent_s = (now_ns - sequence.paced_from_ns) / 1e9
    slack_s = pace_s * (len(sequence.output) - sequence.paced_from_token) - spent_s
    return Pace(pace_s, slack_s, _tokens_per_step(sequence))


def _tokens_per_step(sequence: Sequence) -> float:
    """Of a sequence, lately or never paced. Below one only for want of a place in a step, which is no matter of guesses."""
    if not sequence.paced_from_ns:
        return 1.0
    num_tokens, num_steps = len(sequence.output) - sequence.paced_from_token, max(0, sequence.num_paced_steps - 1)
    return max(1.0, (PRIOR_STEPS + num_tokens) / (PRIOR_STEPS + num_steps))
