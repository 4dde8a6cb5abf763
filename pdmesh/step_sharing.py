"""How prompts share the engine's steps with sequences that have a TPOT objective, and with each other. Pure.

The engine's scheduler keeps these rules (`pdmesh/engine/scheduler/`, which explains them); the router's prediction, the planner
and the simulator reckon with them.
"""

from typing import NamedTuple

PACE_TARGET = 0.9
"""Share of a TPOT objective that is the pace of its tokens; the rest is for time outside of steps, such as the hand-off and the
way to the client."""
SPREAD = 8
"""Steps over which the time by which a sequence is ahead of its pace is used up."""
MAX_SHARE = 0.75
"""Share of the time for steps without prompts: otherwise a sequence behind its pace would admit no prompt."""
BEHIND_TARGET = 0.95
"""But an objective that can still be met comes first: what a sequence is behind this share of it is made up for within SPREAD
steps. With all of it half of the sequences would miss it. See `behind_target`."""
LEAST_TOKENS, LEAST_TOKENS_DRAFTING = 8, 32
"""Prompt tokens of a step that has any. The latter where sequences speculate: where they have more than DRAFTING tokens a
step."""
DRAFTING = 1.1
MOST_WITHOUT_DRAFTING = 2
"""Of so many steps one has prompts, whatever the objectives, where sequences speculate: there steps are fewer and longer.
Elsewhere of SPREAD."""
FORGIVEN = 32
"""The most paces that a sequence can be behind. Time beyond that, which a stalled machine took, is lost: prompts do not make up
for it."""
OLDEST_SHARE = 0.5
"""The least part of a step's prompt tokens that the oldest prompt gets, while it needs them."""
MUCH_SHORTER = 0.5
"""A prompt overtakes the oldest one if it needs at most this part of its tokens."""


def behind_target(filled: float) -> float:
    """Return the share of a TPOT objective that sequences behind their pace keep, where steps without prompts fill the share
    `filled` of it, less than 1. Where those take more than BEHIND_TARGET leaves for prompts, it is half way from what they take
    to the objective: prompts go on."""
    return max(BEHIND_TARGET, (1 + filled) / 2)


def decode_share(filled: float) -> float:
    """Return the largest share of the time that steps without prompts have beside prompts, where such a step fills the share
    `filled` of its sequences' TPOT objective. From 1 on they cannot keep it, and hold no prompt back."""
    return max(MAX_SHARE, filled / behind_target(filled)) if filled < 1 else MAX_SHARE


class Pace(NamedTuple):
    """Hold the schedule of a sequence: a token every `pace_s`, and `slack_s` of time ahead of it (negative: behind).
    `tokens_per_step` of the sequence so far, accepted draft tokens included. `scheduled_s`: the paces of all its tokens."""

    pace_s: float
    slack_s: float
    tokens_per_step: float = 1.0
    scheduled_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Return the longest time that the next step may take."""
        return self.tokens_per_step * self.pace_s + self.slack_s / SPREAD

    def prompts_s(self, decode_s: float) -> float:
        """Return the time that prompts have in the next step. `decode_s`: a step without prompts. It is what the pace leaves, at
        least the prompts' share of the time, but for an objective that would be missed then."""
        return max(min(decode_s * (1 - MAX_SHARE) / MAX_SHARE, self.spare_s(decode_s)), self.step_s - decode_s)

    def spare_s(self, decode_s: float) -> float:
        """Return the time for prompts in the next step after which the sequence still keeps its objective; below 0: none."""
        goal_s = self.tokens_per_step * self.pace_s / PACE_TARGET
        share = behind_target(decode_s / goal_s)
        reserve_s = self.slack_s + (share / PACE_TARGET - 1) * self.scheduled_s
        return share * goal_s + min(0.0, reserve_s) / SPREAD - decode_s


def num_fitting(token_s: float, context_s: float, num_computed: int, num_remaining: int, room_s: float) -> int:
    """Return how many tokens of a prompt, and of the prompts after it, take `room_s`. A token takes `token_s`, and `context_s`
    for each token that it attends to: `num_computed` and those of the step before it."""
    num_tokens = num_behind = 0.0
    for _ in range(2):
        each_s = token_s + context_s * (num_computed + num_behind)
        if each_s <= 0:
            return num_remaining
        num_tokens = room_s / each_s
        num_behind = min(num_tokens, num_remaining) / 2
    return int(num_tokens)


class SavedTokens:
    """Save up the prompt tokens of steps that have room for few: a step has LEAST_TOKENS of prompts, or none, since a slow
    machine takes as long for a few of them as the pace is."""

    def __init__(self) -> None:
        """Begin with nothing saved."""
        self._num_saved = self._num_steps = 0  # prompt tokens that steps without any had room for, and those steps

    def take(self, num_tokens: int, num_remaining: int, *, drafting: bool) -> int:
        """Return the prompt tokens of a step with room for `num_tokens`: none, until steps have saved up for the least of a step
        or for the prompt's `num_remaining`, or so many of them had none."""
        least, most_without = (LEAST_TOKENS_DRAFTING, MOST_WITHOUT_DRAFTING) if drafting else (LEAST_TOKENS, SPREAD)
        self._num_saved += max(0, num_tokens)
        self._num_steps += 1
        if self._num_saved < min(least - 1, num_remaining) and self._num_steps < most_without:
            return 0
        self._num_saved = self._num_steps = 0
        return max(least, num_tokens)
