"""Speculative decoding around the engine's step: which proposers draft, how much is verified, and what is learned.

draft(running, ...)  free proposers, then, where that may pay, those that run a model; the policy ─► a draft for each
the step             verifies them beside everything else (scheduler/scheduler.py, runner/model_runner.py)
learn(draws, ...)    every proposer gets the model's draws, the cost curve gets the step's time

Every proposer runs inside a GuardedProposer. Probes now and then try choices that the policy would not make (`policy.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.runner.model_runner import SampledOutput
from pdmesh.engine.sampling.sampler import NO_TOKEN
from pdmesh.engine.scheduler.scheduler import SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.cost_curve import OUTLIER, CostCurve, HandlingCost, StepSort
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.guarded_proposer import GuardedProposer
from pdmesh.engine.speculation.policy import Choice, Load, Probing, Step, choose, fixed, may_pay
from pdmesh.engine.speculation.proposer import Ask, Proposer, promise
from pdmesh.engine.speculation.proposer_gating import ProposerGate
from pdmesh.engine.speculation.stats import Tally

SURE = 0.97
"""Hardly any draft token has a better chance."""
FIRST_WORTH, WORTH_LEARNING = 0.1, 0.1
"""The assumed gain of calling proposers, in steps, before the first call; and the weight of each call's gain."""
LONGEST_REST = 8
LOOKING = 0.004
"""Where calling proposers gains less than it costs, none is called for one step, then for two, up to LONGEST_REST steps: a call
costs hundredths of a small model's step. Where it costs more, pauses grow until calls take the share LOOKING of the time.
Proposers learn from the tokens of those steps in their next call."""
LOOK_EVERY, LOOK_EVERY_DRAFTED = 16, 4
"""One in this many steps corrects the curve, of similar ones without drafts and of those with drafts or behind one: a correction
takes a hundredth of a small model's step."""
NUM_FIRST = 128
"""Each of the first steps, up to this number, corrects the curve."""


@dataclass(frozen=True)
class Bounds:
    """Hold the bounds of drafts."""

    max_depth: int
    max_tokens: int  # tokens of a whole step
    max_context: int
    fixed_length: int = 0  # 0: the policy's threshold decides
    vocab_size: int | None = None  # token ids are below this; None: unknown


class Rest:
    """Decide in which steps no proposer is called."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._worth = FIRST_WORTH
        self._length = self._left = 0

    @property
    def goes_on(self) -> bool:
        """Return whether the next step calls no proposer."""
        return self._left > 0

    def is_on(self) -> bool:
        """Return whether this step calls no proposer. Call it once for each step."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def saw(self, gain: float, price: float) -> None:
        """Record a call of the proposers, which took `price` times a step's time and whose drafts are worth `gain` steps."""
        self._worth += WORTH_LEARNING * (gain - price - self._worth)
        if self._worth > 0 or not self._longest:
            self._length = 0
            return
        self._left = self._length = min(max(self._longest, int(price / LOOKING)), max(1, 2 * self._length))


class _Chosen(NamedTuple):
    drafts: dict[Sequence, Draft]
    gain: float  # in steps


class Speculator:
    """Call proposers, choose drafts and learn from the results. It belongs to the engine thread."""

    def __init__(
        self,
        proposers: Sequence_[Proposer],
        curve: CostCurve,
        bounds: Bounds,
        *,
        device: torch.device | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Create it. `device`: that of the model's hidden states, to which those of a hand-off are moved; None: they are not
        moved."""
        self.tally = Tally()
        self.curve = curve
        self._bounds, self._device, self._clock_ns = bounds, device, clock_ns
        self._proposers = [GuardedProposer(proposer, bounds.vocab_size, self.tally.fault) for proposer in proposers]
        self._free = [proposer for proposer in self._proposers if proposer.is_free]
        self._free_by_name = {proposer.name: proposer for proposer in self._free}
        self._gated = [ProposerGate(proposer, clock_ns) for proposer in self._proposers if not proposer.is_free]
        self._probing = Probing()
        self._threshold = 0.0
        self._num_prompt_tokens = 0  # prompt tokens of the previous step: the next step is planned after its drafts
        self._rest = Rest(longest=0 if bounds.fixed_length else LONGEST_REST)
        self._num_plain = self._num_seen = 0
        self._handling = HandlingCost()
        self._drafting_ns = 0  # of this step
        self._num_unforgiven = 0  # steps since proposers were forgiven
        self.reads_plain_draws = bool(self._gated) or any(proposer.learns for proposer in self._free)
        """Whether some proposer learns from the draws of steps without drafts."""

    @property
    def wants_hidden(self) -> bool:
        return any(proposer.wants_hidden for proposer in self._proposers)

    @property
    def wants_hidden_now(self) -> bool:
        """Return whether the present step must return hidden states, because a proposer that needs them may be called after
        it."""
        return any(proposer.wants_hidden for proposer in self._free) or any(
            gate.proposer.wants_hidden and self._may_call_next(gate) for gate in self._gated
        )

    def draft(self, running: Sequence_[Sequence], *, has_waiting: bool) -> dict[Sequence, Draft]:
        """Return the drafts by sequence. `has_waiting`: prompts wait, besides those among `running`."""
        self._drafting_ns = 0
        if self._rest.is_on():
            for gate in self._gated:
                gate.rest()
            return {}
        started_ns = self._clock_ns()
        # The property's arithmetic (is_going_on), without calling it for each sequence.
        decoding = [each for each in running if each.output and each.num_to_restore <= each.num_computed]
        has_prompts = has_waiting or len(decoding) < len(running)
        if not decoding or (self._may_probe(has_prompts=has_prompts) and self._probing.wants_plain):
            return {}
        load = self._load(decoding, has_prompts=has_prompts)
        chosen = self._choose_from(decoding, load, has_prompts=has_prompts)
        self._drafting_ns = took_ns = self._clock_ns() - started_ns
        plain_s = load.plain_s(self.curve)
        probing_ns = sum([gate.take_probing_ns() for gate in self._gated])
        self._rest.saw(chosen.gain, (took_ns - probing_ns) / 1e9 / plain_s)
        self.tally.drafted(took_ns)
        return chosen.drafts

    def learn(
        self,
        plan: SchedulerOutput,
        draws: Mapping[Sequence, list[SampledOutput]],
        started_ns: int,
        step_ns: int,
        num_prompt_tokens: int,
    ) -> None:
        """Learn from a step, after the sequences have taken their tokens. `started_ns`: when it began, before its drafts;
        `step_ns`: the time of the plan's computation; `num_prompt_tokens`: how many of its tokens were no new output."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_unforgiven += 1
        if plan.num_repeats and not self.reads_plain_draws:  # a repeated plan has no drafts and no prompts
            self.tally.stepped(plan.num_tokens, ())
            if self._is_one_of_many():
                return
            num_drafted = 0
        else:
            num_drafted = self._learn_draws(plan, draws, step_ns)
        for proposer in self._free:
            proposer.forgive(self._num_unforgiven)
        self._num_unforgiven = 0
        handled_ns = self._clock_ns() - started_ns - step_ns - self._drafting_ns
        self._correct_curve(plan, step_ns / 1e9, num_drafted, handled_ns / 1e9)

    def _learn_draws(self, plan: SchedulerOutput, draws: Mapping[Sequence, list[SampledOutput]], step_ns: int) -> int:
        """Let proposers learn from the draws; return how many draft tokens the step had."""
        lessons = [
            (piece.sequence, draw.verified, draw.hidden)
            for piece in plan.pieces
            for draw in draws.get(piece.sequence, ())
            if draw.verified is not None and NO_TOKEN not in draw.verified.draws
        ]
        self._judge([verified for _, verified, _ in lessons])
        num_drafted = sum([len(piece.draft) for piece in plan.pieces])
        self.tally.computed(step_ns, plan.num_tokens, num_drafted)
        for proposer in self._free:
            if proposer.learns and proposer.is_open:
                proposer.learn(lessons)
        for gate in self._gated:
            gate.learn(draws)
            if gate.proposer.learns and gate.proposer.is_open and self._may_call_next(gate):
                gate.proposer.learn(lessons)
        return num_drafted

    def _may_call_next(self, gate: ProposerGate) -> bool:
        if self._bounds.fixed_length:
            return True
        return not self._rest.goes_on and (gate.may_be_next or self._probing.wants_draft)

    def _judge(self, outcomes: Sequence_[Verified]) -> None:
        drafted = [verified for verified in outcomes if verified.draft]
        self.tally.stepped(len(outcomes), drafted)
        for verified in drafted:
            if (proposer := self._free_by_name.get(verified.draft.proposer)) is not None:
                proposer.judge(verified)

    def take_over(self, sequence: Sequence, hidden: Tensor) -> None:
        """Take over the state `hidden` [hidden_size] float32, from which another worker drew the sequence's last token. It is
        useless after tokens that a grammar forced."""
        if not sequence.num_unreported:
            hidden = hidden.to(self._device or hidden.device)
            for proposer in self._proposers:
                if proposer.is_open:
                    proposer.restore(sequence, hidden)

    def _may_probe(self, *, has_prompts: bool) -> bool:
        """Return whether probes are allowed: beside prompts a step's time tells nothing; with a fixed length nothing is
        learned."""
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
        """Return the call for a sequence's draft; None: a draft after its next token is useless."""
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
        num_prompt_tokens, num_decoding = self._num_prompt_tokens if has_prompts else 0, len(decoding)
        attention_s = self.curve.context_s * context
        plain_s = self.curve.step_s(num_decoding) + attention_s
        handling_s = self._handling.of_drafting(num_decoding, plain_s, has_prompts=has_prompts)
        return Load(num_decoding, num_prompt_tokens, attention_s, handling_s)

    def _propose(self, asks: list[Ask], load: Load, *, at_any_price: bool) -> list[Draft]:
        """Return the best draft of each sequence."""
        best = [NOTHING] * len(asks)
        for proposer in self._free:
            if proposer.is_open:
                best = [max(pair, key=promise) for pair in zip(best, proposer.believed(proposer.propose(asks)), strict=True)]
        for gate in self._gated:
            if not gate.proposer.is_open:
                continue
            if at_any_price or self._bounds.fixed_length:
                best = gate.ask_all(asks, best)
            else:
                best = gate.improve(asks, best, load, self.curve)
        return best

    def _choose(self, asks: list[Ask], drafts: list[Draft], load: Load, decoding: list[Sequence]) -> Choice:
        if self._bounds.fixed_length:
            return fixed(drafts, self._bounds.fixed_length)
        num_known = sum([sequence.num_remaining for sequence in decoding])
        return choose(
            drafts, [ask.sequence.num_tokens for ask in asks], load, self.curve, max(0, self._bounds.max_tokens - num_known)
        )

    def _correct_curve(self, plan: SchedulerOutput, step_s: float, num_drafted: int, handled_s: float) -> None:
        """Correct the curve by a step without prompts; steps with prompts compute more than the curve describes. Only a part of
        the steps is used: there are thousands, and each correction takes as long as drafting. `handled_s`: the time of the step
        besides computing and drafting."""
        if not plan.num_tokens or self._num_prompt_tokens:
            self._probing.saw(None)
            self._handling.passed(has_drafts=bool(num_drafted))
            return
        if not plan.num_repeats or self.reads_plain_draws:
            is_plain = self._handling.sort_of_next(has_drafts=bool(num_drafted)) is StepSort.PLAIN
            if is_plain and self._is_one_of_many():
                return
        num_alike, self._num_plain = max(1, self._num_plain), 0
        self._correct_by_step(plan, step_s, num_drafted, num_alike, handled_s)

    def _is_one_of_many(self) -> bool:
        """Return whether a step without drafts, behind another one, corrects nothing. Call it once for each such step."""
        if self._probing.wants_plain:
            return False
        self._num_plain += 1
        return self._num_plain < LOOK_EVERY and self._num_seen > NUM_FIRST

    def _correct_by_step(self, plan: SchedulerOutput, step_s: float, num_drafted: int, num_alike: int, handled_s: float) -> None:
        curve, num_rows, pieces = self.curve, plan.num_tokens, plan.pieces
        context = sum([piece.sequence.num_tokens for piece in pieces])
        known = sum([(piece.num_tokens - 1) * piece.sequence.num_tokens for piece in pieces if piece.num_tokens > 1])
        drafted = sum([len(piece.draft) * piece.sequence.num_tokens for piece in pieces]) if num_drafted else 0
        plain_attention_s = curve.context_s * context + curve.row_context_s * known
        attention_s = plain_attention_s + curve.row_context_s * drafted
        believed_s = curve.step_s(num_rows) + attention_s
        plain_s = curve.step_s(num_rows - num_drafted) + plain_attention_s
        is_plain = self._handling.sort_of_next(has_drafts=bool(num_drafted)) is StepSort.PLAIN
        is_plain_probe = self._probing.wants_plain and not num_drafted
        is_telling = self._probing.saw(Step(step_s, believed_s, plain_s, bool(num_drafted)), num_alike) or is_plain_probe
        self._num_seen += 1
        if is_telling or is_plain or self._num_seen < NUM_FIRST or not self._num_seen % LOOK_EVERY_DRAFTED:
            self.curve = curve.saw(num_rows, attention_s, step_s)
        if 1 / OUTLIER < step_s / believed_s < OUTLIER:
            self._handling.saw(len(pieces), step_s - believed_s + handled_s, plain_s, has_drafts=bool(num_drafted))
        else:
            self._handling.passed(has_drafts=bool(num_drafted))
