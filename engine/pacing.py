"""How much of prompts a step may hold beside sequences that were promised a pace. Pure.

A sequence with a TPOT objective is to get its tokens at a pace that keeps it with something to spare. From its first step here
it has a schedule; what it is ahead of that is its slack, and steps that hold prompts may use it up bit by bit:

    step <= pace + slack / SPREAD            pace = TARGET · objective; the least of all sequences that decode

So prompts are computed as fast as everybody's objective allows, and what has no objective waits for whole chunks as ever. Slack
is measured, not predicted: a step that took longer than was thought is made up for by the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.sequence import Sequence

TARGET = 0.8
"""Of the objective: the rest is for what a step's time does not contain, as the hand-off and the way to the client."""
SPREAD = 8
"""Steps over which slack is used up."""
LEAST_TOKENS = 8
"""Of prompts, in every step: else a sequence behind its schedule would let nobody begin."""


class StepCost(NamedTuple):
    """What a step takes, in seconds: this much, and so much for each prompt token, for each token that those attend to, for each
    sequence that decodes and for each token that these attend to."""

    fixed_s: float
    per_prefill_token_s: float
    per_prefill_context_s: float
    per_sequence_s: float
    per_context_token_s: float


class Pace(NamedTuple):
    """Of the sequence that leaves least room: a token every `pace_s`, ahead of that by `slack_s` (behind: below zero)."""

    pace_s: float
    slack_s: float

    @property
    def step_s(self) -> float:
        """How long the next step may take."""
        return self.pace_s + self.slack_s / SPREAD


class Pacer:
    """`cost` is told by whoever watches the steps; while it is None, or nobody was promised anything, steps are full."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None

    def start(self, decoding: Iterable[Sequence], now_ns: int) -> None:
        """Begins the schedules of those that have none."""
        for sequence in decoding:
            if not sequence.paced_from_ns and sequence.group.request.tpot_goal_s:
                sequence.paced_from_ns, sequence.paced_from_token = now_ns, len(sequence.output)

    def tightest(self, decoding: Iterable[Sequence], now_ns: int) -> Pace | None:
        """None: nobody that decodes was promised anything."""
        paces = [_pace(sequence, now_ns) for sequence in decoding if sequence.paced_from_ns]
        return min(paces, key=lambda pace: pace.step_s) if paces else None

    def promised_s(self, sequences: Iterable[Sequence]) -> float:
        """The least pace that any of these has or will have; 0: none was promised one."""
        goals_s = [sequence.group.request.tpot_goal_s for sequence in sequences]
        return TARGET * min([goal_s for goal_s in goals_s if goal_s], default=0.0)

    def prompt_tokens(self, decoding: list[Sequence], next_prompt: Sequence, now_ns: int) -> int | None:
        """Of prompts, the next of which is `next_prompt`, this step may hold at most so many; None: as many as fit."""
        cost, pace = self.cost, self.tightest(decoding, now_ns)
        if cost is None or pace is None:
            return None
        context = sum([sequence.num_tokens for sequence in decoding])
        decode_s = cost.fixed_s + cost.per_sequence_s * len(decoding) + cost.per_context_token_s * context
        token_s = cost.per_prefill_token_s + cost.per_prefill_context_s * next_prompt.num_computed
        if token_s <= 0:
            return None
        return max(LEAST_TOKENS, int((pace.step_s - decode_s) / token_s))


def _pace(sequence: Sequence, now_ns: int) -> Pace:
    pace_s = TARGET * sequence.group.request.tpot_goal_s
    spent_s = (now_ns - sequence.paced_from_ns) / 1e9
    return Pace(pace_s, pace_s * (len(sequence.output) - sequence.paced_from_token) - spent_s)
