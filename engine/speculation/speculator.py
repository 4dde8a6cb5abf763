"""Speculation around the engine's step: who is asked for drafts, how much of them is verified, and what was learned.

draft(running, ...)  free proposers, then those that run a model where that may pay; the policy; grammars ─► a draft each
the step             verifies them beside everything else (scheduler.py, runner.py)
learn(draws, ...)    every proposer hears what the model drew, the cost curve what the step took
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

from torch import Tensor

from engine.runner import Draw
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.speculation.asking import Asking
from engine.speculation.constrained import follow
from engine.speculation.cost_curve import CostCurve
from engine.speculation.draft import NOTHING, Draft
from engine.speculation.handover import TakesOver
from engine.speculation.policy import Choice, Load, choose, fixed, threshold
from engine.speculation.proposer import Ask, Proposer, promise
from engine.speculation.tally import Tally

SURE = 0.97
"""No guess has a better chance, or hardly one."""
PATIENCE = 4
LONGEST_REST = 8
"""After more than so many steps for which nothing was worth verifying, nobody is asked for a step, then for two, up to so many:
looking costs a hundredth of a small model's step. Proposers learn from the tokens of those steps when they are asked again."""


@dataclass(frozen=True)
class Bounds:
    """What no draft may exceed."""

    max_depth: int
    max_tokens: int  # of a step, everything together
    max_context: int
    fixed_length: int = 0  # 0: by threshold


class Rest:
    """When to ask nobody."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._num_fruitless = self._length = self._left = 0

    def is_on(self) -> bool:
        """Asked once for each step."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def saw(self, was_worth_it: bool) -> None:
        """Somebody was asked."""
        if was_worth_it:
            self._num_fruitless = self._length = 0
            return
        self._num_fruitless += 1
        if self._num_fruitless > PATIENCE:
            self._left = self._length = min(self._longest, max(1, 2 * self._length))


class Speculator:
    """Asks, chooses, learns. Of the engine thread, as the engine is."""

    def __init__(self, proposers: Sequence_[Proposer], curve: CostCurve, bounds: Bounds) -> None:
        self.tally = Tally()
        self.curve = curve
        self._bounds = bounds
        self._free = [proposer for proposer in proposers if proposer.is_free]
        self._dear = [Asking(proposer) for proposer in proposers if not proposer.is_free]
        self._proposers = list(proposers)
        self._threshold = 0.0
        self._num_prompt_tokens = 0  # of the step before: the next one's is planned after the drafts
        self._rest = Rest(longest=0 if bounds.fixed_length else LONGEST_REST)

    @property
    def wants_hidden(self) -> bool:
        return any(proposer.wants_hidden for proposer in self._proposers)

    def draft(self, running: Iterable[Sequence], *, has_prompts: bool) -> dict[Sequence, Draft]:
        """A draft for each sequence that is to have one. `has_prompts`: some are beside those that decode."""
        if self._rest.is_on():
            return {}
        started_ns = time.monotonic_ns()
        # The property's arithmetic (is_going_on), without calling it for each sequence.
        decoding = [each for each in running if each.output and each.num_to_restore <= each.num_computed]
        load = self._load(decoding, has_prompts=has_prompts)
        chosen = self._choose_from(decoding, load) if decoding and self._may_pay(load) else {}
        if decoding:
            self._rest.saw(bool(chosen))
        self.tally.drafted(time.monotonic_ns() - started_ns)
        return chosen

    def learn(self, plan: Plan, draws: Mapping[Sequence, list[Draw]], step_ns: int) -> None:
        """After the sequences have taken their tokens. `step_ns`: what the plan's computation took."""
        self._num_prompt_tokens = sum(piece.num_tokens for piece in plan.pieces if not piece.sequence.output)
        num_drafted = 0
        for piece in plan.pieces:
            for draw in draws.get(piece.sequence, ()):
                if draw.verified is not None:
                    self.tally.verified(draw.verified)
                    num_drafted += len(draw.verified.draft)
                    for proposer in self._proposers:
                        proposer.learn(piece.sequence, draw.verified, draw.hidden)
        self.tally.computed(step_ns, plan.num_tokens, num_drafted)
        for asking in self._dear:
            asking.learn(draws)
        self._correct_curve(plan, step_ns / 1e9)

    def take_over(self, sequence: Sequence, hidden: Tensor) -> None:
        """Its last token was drawn elsewhere, from `hidden` [hidden_size] float32. Of no use behind what a grammar has forced."""
        if not sequence.num_unreported:
            for proposer in self._proposers:
                if isinstance(proposer, TakesOver):
                    proposer.restore(sequence, hidden)

    def _may_pay(self, load: Load) -> bool:
        """False: a row takes as long as a sure token is worth."""
        if self._bounds.fixed_length:
            return True
        plain_rate = load.num_decoding / (self.curve.step_s(load.num_rows) + load.attention_s)
        return threshold(plain_rate, load.num_rows, self.curve) < SURE

    def _choose_from(self, decoding: list[Sequence], load: Load) -> dict[Sequence, Draft]:
        asks = [ask for sequence in decoding if (ask := self._ask(sequence)) is not None]
        if not asks:
            return {}
        choice = self._choose(asks, self._propose(asks, load), load, decoding)
        self._threshold = choice.threshold
        return {ask.sequence: _allowed(ask.sequence, draft) for ask, draft in zip(asks, choice.drafts, strict=True) if draft}

    def _ask(self, sequence: Sequence) -> Ask | None:
        """None: there is no use in guessing behind this sequence's next token."""
        request = sequence.group.request
        room = min(
            self._bounds.max_depth,
            request.sampling.max_tokens - len(sequence.output) - 1,
            self._bounds.max_context - sequence.num_tokens - 1,
        )
        if room < 1 or request.prefill_only or len(sequence.choices) > 1:
            return None
        return Ask(sequence, room, self._bounds.max_depth, self._threshold)

    def _load(self, decoding: list[Sequence], *, has_prompts: bool) -> Load:
        context = sum([sequence.num_tokens for sequence in decoding])
        num_prompt_tokens = self._num_prompt_tokens if has_prompts else 0
        return Load(len(decoding), num_prompt_tokens, self.curve.context_s * context)

    def _propose(self, asks: list[Ask], load: Load) -> list[Draft]:
        """The best draft of each sequence."""
        best = [NOTHING] * len(asks)
        for proposer in self._free:
            best = [max(pair, key=promise) for pair in zip(best, proposer.propose(asks), strict=True)]
        for asking in self._dear:
            if self._bounds.fixed_length:
                best = asking.ask_all(asks, best)
            else:
                best = asking.improve(asks, best, load, self.curve)
        return best

    def _choose(self, asks: list[Ask], drafts: list[Draft], load: Load, decoding: list[Sequence]) -> Choice:
        if self._bounds.fixed_length:
            return fixed(drafts, self._bounds.fixed_length)
        num_known = sum([sequence.num_remaining for sequence in decoding])
        return choose(
            drafts, [ask.sequence.num_tokens for ask in asks], load, self.curve, max(0, self._bounds.max_tokens - num_known)
        )

    def _correct_curve(self, plan: Plan, step_s: float) -> None:
        """By steps without prompts: those compute more than the curve speaks of."""
        pieces = plan.pieces
        if not all(piece.sequence.output for piece in pieces):
            return
        contexts = [(piece.num_rows, piece.sequence.num_tokens) for piece in pieces]
        attention_s = sum(
            [context * (self.curve.context_s + (num_rows - 1) * self.curve.row_context_s) for num_rows, context in contexts]
        )
        self.curve = self.curve.saw(plan.num_tokens, attention_s, step_s)


def _allowed(sequence: Sequence, draft: Draft) -> Draft:
    matcher = sequence.matcher()
    return draft if matcher is None else follow(matcher, draft)
