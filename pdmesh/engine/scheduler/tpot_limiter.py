"""The TPOT limiter: it limits the prompt tokens of a step that has sequences with a TPOT objective. Pure.

A sequence with a TPOT objective gets its tokens at a pace that keeps the objective with a reserve. Its schedule begins with its
first step here; its slack is the time by which it is ahead of the schedule, and steps with prompts may use up the slack bit by
bit:

    step <= tokens · pace + slack / SPREAD   pace = TARGET · objective; the least of all sequences that decode

So prompts are computed as fast as all objectives allow, and sequences without an objective wait for whole chunks. Slack is
measured, not predicted: the next steps make up for a step that took longer than expected.

A step that accepts draft tokens gives a sequence several tokens, so its steps may be as many paces apart: a sequence that gets
two tokens a step has its steps two paces apart while there are prompts. `tokens` is the sequence's own average, in which the
average of all sequences lately counts as PRIOR_STEPS of its steps: a new sequence is taken to be like the others until it shows
that it is not. The tokens per step of each sequence also decide which objectives can be kept, and how much of a step is left for
prompts where a sequence is behind. Three things are otherwise where sequences speculate; without them prompts waited for a pace
that drafts kept no sequence from missing:

    drafts lengthen the step for all   a sequence for which nothing is drafted cannot keep its objective beside those of others
    steps with prompts draft less      prompts come in fewer and larger pieces
    drafts come late in an output      what a new sequence is behind is made up for over half of the steps that it has left

A step has at least LEAST_TOKENS of prompts, or none: a slow machine takes as long for a few of them as the pace is. Where fewer
fit, several steps save up for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from typing import NamedTuple

from pdmesh.engine.scheduler.sequence import Sequence

TARGET = 0.9
"""Share of the objective; the rest is for time outside of steps, such as the hand-off and the way to the client."""
SPREAD = 8
"""Steps over which slack is used up."""
MAX_SHARE = 0.75
"""Share of the time for steps without prompts: otherwise a sequence behind its schedule would admit no prompt."""
BEHIND_TARGET = 0.95
"""But an objective that can still be met comes first: what a sequence is behind this share of it is made up for within SPREAD
steps, or more where sequences speculate. With all of it half of the sequences would miss it. Where steps without prompts take
more than that share leaves for prompts, it is half way from what they take to the objective: prompts go on."""
LEAST_TOKENS, LEAST_TOKENS_DRAFTING = 8, 32
"""Prompt tokens of a step that has any; of SPREAD steps one has them, whatever the objectives. The latter where sequences
speculate."""
DRAFTING = 1.1
"""Sequences speculate where they have more tokens a step than that."""
PRIOR_STEPS = 8
"""Weight, in steps, of what other sequences had lately in a sequence's average of tokens per step."""
LEARN, LEARN_OUTPUT = 1 / 32, 1 / 8
"""How far one step moves what sequences have had lately, and one output how long outputs are."""
FORGIVEN = 32
"""The most paces that a sequence can be behind. Time beyond that, which a stalled machine took, is lost: prompts do not make up
for it."""


class StepCost(NamedTuple):
    """Hold the time of a step in seconds: a fixed part, then parts for each prompt token, each token that prompt tokens attend
    to, each sequence that decodes and each token that those sequences attend to."""

    fixed_s: float
    per_prefill_token_s: float
    per_prefill_context_s: float
    per_sequence_s: float
    per_context_token_s: float


class Pace(NamedTuple):
    """Hold the tightest schedule: a token every `pace_s`, and `slack_s` of time ahead of it (negative: behind). `tokens_per_step`
    of the sequence so far, accepted draft tokens included. `scheduled_s`: the paces of all its tokens. What it is behind is made
    up for within `num_steps`."""

    pace_s: float
    slack_s: float
    tokens_per_step: float = 1.0
    scheduled_s: float = 0.0
    num_steps: float = SPREAD

    @property
    def step_s(self) -> float:
        """Return the longest time that the next step may take."""
        return self.tokens_per_step * self.pace_s + self.slack_s / (SPREAD if self.slack_s > 0 else self.num_steps)

    def spare_s(self, decode_s: float) -> float:
        """Return the time for prompts in the next step after which the sequence still keeps its objective; below 0: none.
        `decode_s`: a step without prompts."""
        goal_s = self.tokens_per_step * self.pace_s / TARGET
        share = max(BEHIND_TARGET, (1 + decode_s / goal_s) / 2)
        reserve_s = self.slack_s + (share / TARGET - 1) * self.scheduled_s
        return share * goal_s + min(0.0, reserve_s) / self.num_steps - decode_s


class TpotLimiter:
    """Limit the prompt tokens of steps. `cost` is set from outside; while it is None, or no sequence has an objective, steps are
    full."""

    def __init__(self, *, is_on: bool = True) -> None:
        """Create it. `is_on` False: objectives are ignored."""
        self._is_on = is_on
        self.cost: StepCost | None = None
        # Lately: tokens per step of a sequence, draft tokens of one in steps with prompts, and tokens of a whole output.
        self._typical, self._num_guessed, self._output = 1.0, 0.0, 0.0
        self._num_saved = self._num_without = 0  # prompt tokens that steps without any had room for, and those steps

    def start(self, decoding: Iterable[Sequence], now_ns: int) -> None:
        """Begin the schedules of sequences that have none; move the schedules of sequences that are more than FORGIVEN paces
        behind. To be called once a step, before it is planned."""
        num_tokens = num_steps = 0
        for sequence in decoding:
            goal_s = sequence.group.request.tpot_goal_s
            if not goal_s or not self._is_on:
                continue
            if not sequence.paced_from_ns:
                sequence.paced_from_ns, sequence.paced_from_token, sequence.num_paced_steps = now_ns, len(sequence.output), 0
            num_tokens += len(sequence.output) - sequence.paced_from_token
            num_steps += sequence.num_paced_steps
            sequence.num_paced_steps += 1
            excess_s = -FORGIVEN * TARGET * goal_s - self._pace(sequence, now_ns).slack_s
            if excess_s > 0:
                sequence.paced_from_ns += int(1e9 * excess_s)
        if num_steps:
            self._typical += LEARN * (max(1.0, num_tokens / num_steps) - self._typical)

    def ended(self, sequence: Sequence) -> None:
        """Note that a sequence has had its last step."""
        if sequence.paced_from_ns:
            self._output += LEARN_OUTPUT * (len(sequence.output) - self._output)

    def tightest(self, decoding: Sequence_[Sequence], now_ns: int) -> Pace | None:
        """Return the tightest schedule; None: no decoding sequence has an objective that steps without prompts, with
        the drafts that are usual, can keep."""
        decode_s = self._decode_s(decoding, self._num_guessed * len(decoding))
        paces = [self._pace(sequence, now_ns) for sequence in decoding if sequence.paced_from_ns]
        possible = [pace for pace in paces if pace.pace_s * pace.tokens_per_step > TARGET * decode_s]
        return min(possible, key=lambda pace: pace.step_s) if possible else None

    def promised_s(self, sequences: Iterable[Sequence], decoding: Sequence_[Sequence]) -> float:
        """Return the smallest pace that any of `sequences` has or will have beside `decoding`; 0: none has an objective that can
        be kept."""
        if not self._is_on:
            return 0.0
        decode_s = self._decode_s(decoding, self._num_guessed * len(decoding))
        goals_s = [(each, each.group.request.tpot_goal_s) for each in sequences]
        return TARGET * min([goal_s for each, goal_s in goals_s if goal_s * self._tokens_per_step(each) > decode_s], default=0.0)

    def prompt_tokens(self, decoding: list[Sequence], next_prompt: Sequence, now_ns: int, num_guessed: int = 0) -> int | None:
        """Return the prompt tokens that this step may have, where `next_prompt` comes first; None: as many as fit. `num_guessed`:
        draft tokens beside the known ones of `decoding`."""
        if decoding:
            self._num_guessed += LEARN * (num_guessed / len(decoding) - self._num_guessed)
        cost, pace = self.cost, self.tightest(decoding, now_ns)
        if cost is None or pace is None:
            return None
        decode_s = self._decode_s(decoding, num_guessed)
        least_s = min(decode_s * (1 - MAX_SHARE) / MAX_SHARE, pace.spare_s(decode_s))
        return self._worth_a_pass(next_prompt, _fitting(cost, next_prompt, max(least_s, pace.step_s - decode_s)))

    def _worth_a_pass(self, prompt: Sequence, num_fitting: int) -> int:
        """Return the prompt tokens of a step with room for `num_fitting`: none, until steps have saved up for the least of a step
        or for the rest of `prompt`, or SPREAD of them had none."""
        least = LEAST_TOKENS_DRAFTING if self._speculates else LEAST_TOKENS
        self._num_saved += max(0, num_fitting)
        self._num_without += 1
        if self._num_saved < min(least - 1, prompt.num_remaining) and self._num_without < SPREAD:
            return 0
        self._num_saved = self._num_without = 0
        return max(least, num_fitting)

    @property
    def _speculates(self) -> bool:
        """Return whether drafts give sequences more tokens lately; what a grammar forces is no draft."""
        return self._num_guessed > 0 and self._typical > DRAFTING

    def _pace(self, sequence: Sequence, now_ns: int) -> Pace:
        pace_s = TARGET * sequence.group.request.tpot_goal_s
        spent_s = (now_ns - sequence.paced_from_ns) / 1e9
        num_tokens = len(sequence.output) - sequence.paced_from_token
        slack_s, tokens = pace_s * num_tokens - spent_s, self._tokens_per_step(sequence)
        return Pace(pace_s, slack_s, tokens, pace_s * num_tokens, self._num_steps(sequence, num_tokens, tokens))

    def _num_steps(self, sequence: Sequence, num_tokens: int, tokens: float) -> float:
        """Return within how many steps a sequence that is behind makes up for it. Those that it has left are estimated: until its
        output is as long as others were, then as many again as it has had."""
        if not self._speculates:
            return SPREAD
        length = len(sequence.output)
        num_left = min(sequence.group.request.sampling.max_tokens - length, max(self._output - length, num_tokens))
        return max(SPREAD, num_left / tokens / 2)

    def _tokens_per_step(self, sequence: Sequence) -> float:
        """Return a sequence's tokens per step since its schedule began; without a schedule what others had lately. The average is
        below one only where steps left the sequence out, so it counts as one."""
        typical = self._typical if self._speculates else 1.0
        if not sequence.paced_from_ns:
            return typical
        num_tokens, num_steps = len(sequence.output) - sequence.paced_from_token, max(0, sequence.num_paced_steps - 1)
        return max(1.0, (PRIOR_STEPS * typical + num_tokens) / (PRIOR_STEPS + num_steps))

    def _decode_s(self, decoding: Sequence_[Sequence], num_guessed: float = 0.0) -> float:
        """Return the time of a step of `decoding` without prompts, with so many draft tokens; 0 while `cost` is unknown."""
        if self.cost is None:
            return 0.0
        context, num_rows = sum([sequence.num_tokens for sequence in decoding]), len(decoding) + num_guessed
        return self.cost.fixed_s + self.cost.per_sequence_s * num_rows + self.cost.per_context_token_s * context


def _fitting(cost: StepCost, prompt: Sequence, room_s: float) -> int:
    """Return how many tokens of `prompt`, and of the prompts after it, take `room_s`. A token's time grows with the tokens that
    it attends to."""
    num_tokens = num_behind = 0.0
    for _ in range(2):
        token_s = cost.per_prefill_token_s + cost.per_prefill_context_s * (prompt.num_computed + num_behind)
        if token_s <= 0:
            return prompt.num_remaining
        num_tokens = room_s / token_s
        num_behind = min(num_tokens, prompt.num_remaining) / 2
    return int(num_tokens)
