"""The TPOT limiter: it limits the prompt tokens of a step that has sequences with a TPOT objective. Pure.

A sequence with a TPOT objective gets its tokens at a pace that keeps the objective with a reserve. Its schedule begins with its
first step here; its slack is the time by which it is ahead of the schedule, and steps with prompts may use up the slack bit by
bit:

    step <= tokens · pace + slack / SPREAD   pace = PACE_TARGET · objective; the least of all sequences that decode

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
    drafts come late in an output      a new sequence is behind at first: prompts have every second step at least, and the one
                                       whose turn it is waits no longer once it might miss its TTFT objective

A step has at least LEAST_TOKENS of prompts, or none: a slow machine takes as long for a few of them as the pace is. Where fewer
fit, several steps save up for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from typing import NamedTuple

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.step_sharing import DRAFTING, FORGIVEN, PACE_TARGET, Pace, SavedTokens, num_fitting

PRIOR_STEPS = 8
"""Weight, in steps, of what other sequences had lately in a sequence's average of tokens per step."""
LEARN = 1 / 32
"""How far one step moves what sequences have had lately."""


class StepCost(NamedTuple):
    """Hold the time of a step in seconds: a fixed part, then parts for each prompt token, each token that prompt tokens attend
    to, each sequence that decodes and each token that those sequences attend to."""

    fixed_s: float
    per_prefill_token_s: float
    per_prefill_context_s: float
    per_sequence_s: float
    per_context_token_s: float


class TpotLimiter:
    """Limit the prompt tokens of steps. `cost` is set from outside; while it is None, or no sequence has an objective, steps are
    full."""

    def __init__(self, *, is_on: bool = True) -> None:
        """Create it. `is_on` False: objectives are ignored."""
        self._is_on = is_on
        self.cost: StepCost | None = None
        # Lately: tokens per step of a sequence, and draft tokens of one in steps with prompts.
        self._typical, self._num_guessed = 1.0, 0.0
        self._saved = SavedTokens()

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
            excess_s = -FORGIVEN * PACE_TARGET * goal_s - self._pace(sequence, now_ns).slack_s
            if excess_s > 0:
                sequence.paced_from_ns += int(1e9 * excess_s)
        if num_steps:
            self._typical += LEARN * (max(1.0, num_tokens / num_steps) - self._typical)

    def tightest(self, decoding: Sequence_[Sequence], now_ns: int) -> Pace | None:
        """Return the tightest schedule; None: no decoding sequence has an objective that steps without prompts, with
        the drafts that are usual, can keep."""
        decode_s = self._decode_s(decoding, self._num_guessed * len(decoding))
        paces = [self._pace(sequence, now_ns) for sequence in decoding if sequence.paced_from_ns]
        possible = [pace for pace in paces if pace.pace_s * pace.tokens_per_step > PACE_TARGET * decode_s]
        return min(possible, key=lambda pace: pace.step_s) if possible else None

    def promised_s(self, sequences: Iterable[Sequence], decoding: Sequence_[Sequence]) -> float:
        """Return the smallest pace that any of `sequences` has or will have beside `decoding`; 0: none has an objective that can
        be kept."""
        if not self._is_on:
            return 0.0
        decode_s = self._decode_s(decoding, self._num_guessed * len(decoding))
        goals_s = [(each, each.group.request.tpot_goal_s) for each in sequences]
        return PACE_TARGET * min(
            [goal_s for each, goal_s in goals_s if goal_s * self._tokens_per_step(each) > decode_s], default=0.0
        )

    def prompt_tokens(self, decoding: list[Sequence], next_prompt: Sequence, now_ns: int, num_guessed: int = 0) -> int | None:
        """Return the prompt tokens that this step may have, where `next_prompt` comes first; None: as many as fit. `num_guessed`:
        draft tokens beside the known ones of `decoding`."""
        if decoding:
            self._num_guessed += LEARN * (num_guessed / len(decoding) - self._num_guessed)
        cost, pace = self.cost, self.tightest(decoding, now_ns)
        if cost is None or pace is None:
            return None
        token_s, context_s = cost.per_prefill_token_s, cost.per_prefill_context_s
        room_s = pace.prompts_s(self._decode_s(decoding, num_guessed))
        first, num_left, is_drafting = next_prompt.num_computed, next_prompt.num_remaining, self._speculates
        allowed = self._saved.take(num_fitting(token_s, context_s, first, num_left, room_s), num_left, drafting=is_drafting)
        alone_s = num_left * (token_s + context_s * (first + num_left / 2))
        return max(allowed, num_left) if is_drafting and _is_due(next_prompt, now_ns + int(1e9 * alone_s)) else allowed

    @property
    def _speculates(self) -> bool:
        """Return whether drafts give sequences more tokens lately; what a grammar forces is no draft."""
        return self._num_guessed > 0 and self._typical > DRAFTING

    def _pace(self, sequence: Sequence, now_ns: int) -> Pace:
        pace_s = PACE_TARGET * sequence.group.request.tpot_goal_s
        spent_s = (now_ns - sequence.paced_from_ns) / 1e9
        num_tokens = len(sequence.output) - sequence.paced_from_token
        return Pace(pace_s, pace_s * num_tokens - spent_s, self._tokens_per_step(sequence), pace_s * num_tokens)

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


def _is_due(prompt: Sequence, ends_ns: int) -> bool:
    """Return whether a prompt without any output, which would be computed by `ends_ns` if it began now, is not to wait longer."""
    return not prompt.output and 0 < prompt.group.request.unpaced_from_ns <= ends_ns
