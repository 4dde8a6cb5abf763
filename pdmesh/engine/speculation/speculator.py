"""Speculative decoding around the engine's step: which proposers draft, how much is verified, and what is learned.

draft(running, ...)  free proposers, then those that run a model where that may pay; the policy ─► a draft each
the step             verifies them beside everything else (scheduler/scheduler.py, runner/model_runner.py)
learn(draws, ...)    every proposer gets what the model drew, the cost curve what the step took

Proposers run behind a GuardedProposer, and what the policy never does is tried now and then (`policy.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.runner.model_runner import SampledOutput
from pdmesh.engine.sampling.sampler import NO_TOKEN
from pdmesh.engine.scheduler.scheduler import SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.cost_curve import CostCurve
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.guarded_proposer import GuardedProposer
from pdmesh.engine.speculation.policy import Choice, Load, Probing, Step, choose, fixed, may_pay
from pdmesh.engine.speculation.proposer import Ask, Proposer, promise
from pdmesh.engine.speculation.proposer_gating import ProposerGate
from pdmesh.engine.speculation.stats import Tally

SURE = 0.97
"""Hardly any draft token has a better chance."""
FIRST_WORTH, WORTH_LEARNING = 0.1, 0.1
"""Value of looking for drafts, in steps, before anything is known; and the weight of each look."""
LONGEST_REST = 8
LOOKING = 0.004
"""Where looking gains less than it costs, no proposer is called for a step, then for two, up to so many: a look costs hundredths
of a small model's step. Rests grow until it takes LOOKING of the time. Proposers learn from the tokens of those steps in their
next call."""
LOOK_EVERY = 4
"""One of so many steps that are alike corrects the curve."""
NUM_FIRST = 128
"""Each of so many first steps does."""


@dataclass(frozen=True)
class Bounds:
    """Hold what no draft may exceed."""

    max_depth: int
    max_tokens: int  # tokens of a step, everything together
    max_context: int
    fixed_length: int = 0  # 0: by threshold
    vocab_size: int | None = None  # token ids are below; None: unknown


class Rest:
    """Decide when to call no proposer."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._worth = FIRST_WORTH
        self._length = self._left = 0

    @property
    def goes_on(self) -> bool:
        """Return whether no proposer is called in the next step."""
        return self._left > 0

    def is_on(self) -> bool:
        """Return whether this step rests. Called once for each step."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def saw(self, gain: float, price: float) -> None:
        """Record that proposers were called, at `price` times a step's time; their drafts are worth `gain` steps."""
        self._worth += WORTH_LEARNING * (gain - price - self._worth)
        if self._worth > 0 or not self._longest:
            self._length = 0
            return
        self._left = self._length = min(max(self._longest, int(price / LOOKING)), max(1, 2 * self._length))


class _Chosen(NamedTuple):
    drafts: dict[Sequence, Draft]
    gain: float  # in steps


class Speculator:
    """Call proposers, choose drafts, learn. It belongs to the engine thread."""

    def __init__(
        self,
        proposers: Sequence_[Proposer],
        curve: CostCurve,
        bounds: Bounds,
        *,
        device: torch.device | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`device` of the model's hidden states; None: they stay where they are."""
        self.tally = Tally()
        self.curve = curve
        self._bounds, self._device, self._clock_ns = bounds, device, clock_ns
        self._proposers = [GuardedProposer(proposer, bounds.vocab_size, self.tally.fault) for proposer in proposers]
        self._free = [door for door in self._proposers if door.is_free]
        self._makers = {door.name: door for door in self._free}
        self._dear = [ProposerGate(door, clock_ns) for door in self._proposers if not door.is_free]
        self._probing = Probing()
        self._threshold = 0.0
        self._num_prompt_tokens = 0  # prompt tokens of the step before: the next step is planned after the drafts
        self._rest = Rest(longest=0 if bounds.fixed_length else LONGEST_REST)
        self._num_plain = self._num_seen = 0

    @property
    def wants_hidden(self) -> bool:
        return any(proposer.wants_hidden for proposer in self._proposers)

    @property
    def wants_hidden_now(self) -> bool:
        """Return whether the hidden states of the present step are needed: those proposers may be called behind it."""
        return any(door.wants_hidden for door in self._free) or any(
            asking.proposer.wants_hidden and self._may_ask_next(asking) for asking in self._dear
        )

    def draft(self, running: Iterable[Sequence], *, has_prompts: bool) -> dict[Sequence, Draft]:
        """Return a draft for each sequence that gets one. `has_prompts`: the step has prompts beside those that decode."""
        if self._rest.is_on():
            for asking in self._dear:
                asking.rest()
            return {}
        started_ns = self._clock_ns()
        # The property's arithmetic (is_going_on), without calling it for each sequence.
        decoding = [each for each in running if each.output and each.num_to_restore <= each.num_computed]
        if not decoding or (self._may_probe(has_prompts=has_prompts) and self._probing.wants_plain):
            return {}
        load = self._load(decoding, has_prompts=has_prompts)
        chosen = self._choose_from(decoding, load, has_prompts=has_prompts)
        took_ns = self._clock_ns() - started_ns
        plain_s = load.plain_s(self.curve)
        probing_ns = sum([asking.take_probing_ns() for asking in self._dear])
        self._rest.saw(chosen.gain, (took_ns - probing_ns) / 1e9 / plain_s)
        self.tally.drafted(took_ns)
        return chosen.drafts

    def learn(
        self, plan: SchedulerOutput, draws: Mapping[Sequence, list[SampledOutput]], step_ns: int, num_prompt_tokens: int
    ) -> None:
        """Learn, after the sequences have taken their tokens. `step_ns`: what the plan's computation took; `num_prompt_tokens`:
        how many of its tokens were no new output."""
        self._num_prompt_tokens = num_prompt_tokens
        lessons = [
            (piece.sequence, draw.verified, draw.hidden)
            for piece in plan.pieces
            for draw in draws.get(piece.sequence, ())
            if draw.verified is not None and NO_TOKEN not in draw.verified.draws
        ]
        self._judge([verified for _, verified, _ in lessons])
        num_drafted = sum([len(piece.draft) for piece in plan.pieces])
        self.tally.computed(step_ns, plan.num_tokens, num_drafted)
        for door in self._free:
            if door.learns and door.is_open:
                door.learn(lessons)
        for asking in self._dear:
            asking.learn(draws)
            if asking.proposer.learns and asking.proposer.is_open and self._may_ask_next(asking):
                asking.proposer.learn(lessons)
        for door in self._free:
            door.forgive()
        self._correct_curve(plan, step_ns / 1e9)

    def _may_ask_next(self, asking: ProposerGate) -> bool:
        if self._bounds.fixed_length:
            return True
        return not self._rest.goes_on and (asking.may_be_next or self._probing.wants_draft)

    def _judge(self, outcomes: Sequence_[Verified]) -> None:
        drafted = [verified for verified in outcomes if verified.draft]
        self.tally.stepped(len(outcomes), drafted)
        for verified in drafted:
            if (maker := self._makers.get(verified.draft.proposer)) is not None:
                maker.judge(verified)

    def take_over(self, sequence: Sequence, hidden: Tensor) -> None:
        """Take over the state `hidden` [hidden_size] float32, from which its last token was drawn elsewhere. Useless behind
        forced tokens."""
        if not sequence.num_unreported:
            hidden = hidden.to(self._device or hidden.device)
            for door in self._proposers:
                if door.is_open:
                    door.restore(sequence, hidden)

    def _may_probe(self, *, has_prompts: bool) -> bool:
        """Return whether probes are allowed: beside prompts a step's time would say nothing; a fixed length learns nothing."""
        return not has_prompts and not self._bounds.fixed_length

    def _choose_from(self, decoding: list[Sequence], load: Load, *, has_prompts: bool) -> _Chosen:
        probes = self._may_probe(has_prompts=has_prompts)
        is_due = probes and self._probing.wants_draft
        asks = [ask for sequence in decoding if (ask := self._ask(sequence, 0.0 if is_due else self._threshold)) is not None]
        is_worth_it = bool(asks) and self._may_pay(load, len(asks))
        if not asks or not (is_due or is_worth_it):
            return _Chosen({}, 0.0)
        if probes and self._probing.affords_trial(load, self.curve):
            asks[0] = asks[0]._replace(may_try=True)
        started_ns = self._clock_ns()
        drafts = self._propose(asks, load, at_any_price=not is_worth_it)
        if not is_worth_it:
            self._probing.pay((self._clock_ns() - started_ns) / 1e9, self.curve.step_s(load.num_rows))
        choice = self._choose(asks, drafts, load, decoding)
        self._threshold = choice.threshold
        if probes and not any(choice.drafts):
            choice = replace(choice, drafts=self._probing.pick(drafts, load, self.curve))
        drafted = {ask.sequence: draft for ask, draft in zip(asks, choice.drafts, strict=True) if draft}
        return _Chosen(drafted, choice.gain)

    def _may_pay(self, load: Load, num_asks: int) -> bool:
        if self._bounds.fixed_length:
            return True
        most = min(num_asks * self._bounds.max_depth, self._bounds.max_tokens)
        return may_pay(load, self.curve, most, SURE)

    def _ask(self, sequence: Sequence, least_chance: float) -> Ask | None:
        """Return the ask for a sequence; None: a draft behind its next token is useless."""
        request = sequence.group.request
        room = min(
            self._bounds.max_depth,
            request.sampling.max_tokens - len(sequence.output) - 1,
            self._bounds.max_context - sequence.num_tokens - 1,
        )
        if room < 1 or request.prefill_only or len(sequence.choices) > 1:
            return None
        return Ask(sequence, room, self._bounds.max_depth, least_chance)

    def _load(self, decoding: list[Sequence], *, has_prompts: bool) -> Load:
        context = sum([sequence.num_tokens for sequence in decoding])
        num_prompt_tokens = self._num_prompt_tokens if has_prompts else 0
        return Load(len(decoding), num_prompt_tokens, self.curve.context_s * context)

    def _propose(self, asks: list[Ask], load: Load, *, at_any_price: bool) -> list[Draft]:
        """Return the best draft of each sequence."""
        best = [NOTHING] * len(asks)
        for door in self._free:
            if door.is_open:
                best = [max(pair, key=promise) for pair in zip(best, door.believed(door.propose(asks)), strict=True)]
        for asking in self._dear:
            if not asking.proposer.is_open:
                continue
            if at_any_price or self._bounds.fixed_length:
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

    def _correct_curve(self, plan: SchedulerOutput, step_s: float) -> None:
        """Correct the curve by steps without prompts, which compute more than the curve describes. Only a part of them is used:
        there are thousands, and each correction takes as long as drafting."""
        if not plan.pieces or self._num_prompt_tokens:
            self._probing.saw(None)
            return
        num_drafted = sum([len(piece.draft) for piece in plan.pieces])
        if not num_drafted and not self._probing.wants_plain:
            self._num_plain += 1
            if self._num_plain < LOOK_EVERY and self._num_seen > NUM_FIRST:
                return
        num_alike, self._num_plain = max(1, self._num_plain), 0
        self._look_at(plan, step_s, num_drafted, num_alike)

    def _look_at(self, plan: SchedulerOutput, step_s: float, num_drafted: int, num_alike: int) -> None:
        curve, num_rows = self.curve, plan.num_tokens
        context = sum([piece.sequence.num_tokens for piece in plan.pieces])
        known = sum([(piece.num_tokens - 1) * piece.sequence.num_tokens for piece in plan.pieces if piece.num_tokens > 1])
        drafted = sum([len(piece.draft) * piece.sequence.num_tokens for piece in plan.pieces]) if num_drafted else 0
        plain_attention_s = curve.context_s * context + curve.row_context_s * known
        attention_s = plain_attention_s + curve.row_context_s * drafted
        believed_s = curve.step_s(num_rows) + attention_s
        plain_s = curve.step_s(num_rows - num_drafted) + plain_attention_s
        is_telling = self._probing.saw(Step(step_s, believed_s, plain_s, bool(num_drafted)), num_alike)
        self._num_seen += 1
        if is_telling or not num_drafted or self._num_seen < NUM_FIRST or not self._num_seen % LOOK_EVERY:
            self.curve = curve.saw(num_rows, attention_s, step_s)
