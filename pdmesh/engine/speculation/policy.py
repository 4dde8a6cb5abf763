"""The policy of speculation: it decides which draft tokens the next step verifies. Pure.

A step of n sequences and m draft tokens gives n + Σ c tokens, c being the chance that a draft token is accepted, and takes
t(n + m), and a time that any drafts take, however few (`cost_curve.py`). The draft tokens are taken in the order of their
chances (a token's chance is never above its parent's, so they form trees), and as many as make (n + Σ c) / t the largest; none,
where they would not raise it. In other words a draft continues until its cumulative chance falls below a threshold: the cost of
one more row, in tokens. The threshold is no setting: it follows from the other drafts, from the number of sequences in the step,
and from the measured curve (`cost_curve.py`).

Prompts in the step take their time with or without drafts, and an accepted token saves a share of a later step, usually one
without prompts. So t is the time of the decoding sequences alone, plus the time that drafts add to the present step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.engine.speculation.cost_curve import OUTLIER, CostCurve
from pdmesh.engine.speculation.draft import NOTHING, Draft

MARGIN = 0.05
"""Share that speculation must be expected to gain: chances and costs are estimates, and a tie is not worth the risk."""


@dataclass(frozen=True)
class Load:
    """Describe a step without drafts: the sequences that decode, the prompt tokens beside them, and the time of attention.
    `handling_s`: what a step with drafts takes besides its forward pass (`cost_curve.py`)."""

    num_decoding: int
    num_prompt_tokens: int
    attention_s: float
    handling_s: float = 0.0

    @property
    def num_rows(self) -> int:
        return self.num_decoding + self.num_prompt_tokens

    def plain_s(self, curve: CostCurve) -> float:
        """Return the time of the decoding sequences alone."""
        return curve.step_s(self.num_decoding) + self.attention_s

    def drafted_s(self, curve: CostCurve, num_drafted: int) -> float:
        """Return that time plus the time that `num_drafted` draft tokens add, without their attention."""
        if not num_drafted:
            return self.plain_s(curve)
        return self.plain_s(curve) + self.handling_s + curve.step_s(self.num_rows + num_drafted) - curve.step_s(self.num_rows)


@dataclass(frozen=True)
class Choice:
    """Hold the part of each draft to verify, in the drafts' order; `threshold`: the chance below which no further token pays."""

    drafts: list[Draft]
    threshold: float
    num_expected: float  # expected number of accepted tokens
    gain: float = 0.0  # value of the tokens less their cost, in steps without drafts


def choose(drafts: Sequence[Draft], contexts: Sequence[int], load: Load, curve: CostCurve, max_tokens: int) -> Choice:
    """Choose the draft tokens to verify. `contexts`: known tokens of each draft's sequence; `max_tokens`: of all drafts
    together."""
    plain_s = load.plain_s(curve)
    plain_rate, beside_s = load.num_decoding / plain_s, plain_s + load.handling_s - curve.step_s(load.num_rows)
    least = threshold(plain_rate, load.num_rows, curve)
    candidates = sorted(
        [
            (-chance, number, index)
            for number, draft in enumerate(drafts)
            for index, chance in enumerate(draft.cumulative)
            if chance >= least
        ]
    )[:max_tokens]
    best_rate = (1.0 + MARGIN) * plain_rate
    expected, attention_s, best, best_expected = float(load.num_decoding), 0.0, 0, 0.0
    gain = 0.0
    for count, (negative, number, _) in enumerate(candidates, start=1):
        expected -= negative
        attention_s += curve.row_context_s * contexts[number]
        rate = expected / (beside_s + curve.step_s(load.num_rows + count) + attention_s)
        if rate > best_rate:
            best_rate, best, best_expected = rate, count, expected - load.num_decoding
            gain = expected / load.num_decoding - expected / rate / plain_s
    if not best:
        return Choice([NOTHING] * len(drafts), least, 0.0)
    wanted = [[False] * len(draft) for draft in drafts]
    for _, number, index in candidates[:best]:
        wanted[number][index] = True
    chosen = [draft.keep(keep) if any(keep) else NOTHING for draft, keep in zip(drafts, wanted, strict=True)]
    return Choice(chosen, threshold(best_rate, load.num_rows + best, curve), best_expected, gain)


def may_pay(load: Load, curve: CostCurve, max_tokens: int, best_chance: float) -> bool:
    """Return whether drafts could pay; False: no number of draft tokens up to `max_tokens` would, each with `best_chance`."""
    plain_s = load.plain_s(curve)
    most = load.num_rows + max_tokens
    ends = [rows for rows in curve.rows if load.num_rows < rows < most]  # between two points the rate is monotonic
    return any(
        (load.num_decoding + best_chance * (rows - load.num_rows)) * plain_s
        > (1 + MARGIN) * load.num_decoding * load.drafted_s(curve, rows - load.num_rows)
        for rows in (*ends, most)
    )


def threshold(rate: float, num_rows: int, curve: CostCurve) -> float:
    """Return the chance below which no draft token pays: the least time of one more row, in tokens that come at `rate`."""
    return min(1.0, rate * curve.least_row_s(num_rows))


def fixed(drafts: Sequence[Draft], length: int) -> Choice:
    """Return the first `length` tokens of each draft's first branch, whatever their cost: the baseline for the threshold."""
    first = [draft.first(len(draft.branches[0])).first(length) if draft else NOTHING for draft in drafts]
    return Choice(first, 0.0, sum(sum(draft.cumulative) for draft in first))


# Probes: steps that verify a draft, or none, only to learn their cost. Pure: the caller reports the times of steps.
#
# The policy makes the choice that it expects to be best, so it learns nothing about the alternatives. Two probes therefore go
# against its advice now and then: where drafts were rejected, a small one is verified; where drafts were verified in every step
# for long, a step has none. Each becomes rarer while it only confirms the expectation.
#
#     draft verified against advice     takes longer than a step without it: paid from SHARE of the time of all steps
#     step without drafts               gives fewer tokens: at most one step in LONGEST
#
# Trials (`Draft.is_trial`) are paid from the same share.


SHARE = 0.003
"""Share of the time of all steps that probes may take."""
MOST_SAVED = 8
"""The most time that is saved up, in steps."""
SHORTEST, LONGEST = 32, 256
"""Bounds of the number of steps between two probes of a kind."""
RETRY = 4
CONFIRMED = 1.1
"""A probe confirms the expectation if its step took less than this many times the expected time, and more than the inverse."""
SIZES = (1, 2, 4, 8)
"""Numbers of draft tokens in probes, in turn."""
TRIAL_TOKENS, TRIAL_STEPS = 4, 8
"""A trial begins only when its whole cost has been saved up."""


class ProbeTimer:
    """Count steps until the next probe of one kind."""

    def __init__(self) -> None:
        self._length = self._left = SHORTEST

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def step(self, count: int) -> None:
        self._left -= count

    def again(self) -> None:
        """Restart: no probe was needed."""
        self._left = self._length

    def retry(self) -> None:
        """Probe again soon, because there was no draft to probe with: proposers that run a model draft for a few steps in a row,
        then pause long."""
        self._left = RETRY

    def learned(self, ratio: float) -> None:
        """Record that a probe took `ratio` times the expected time."""
        is_confirmed = 1 / CONFIRMED < ratio < CONFIRMED
        self._length = min(LONGEST, 2 * self._length) if is_confirmed else SHORTEST
        self._left = self._length


class Step(NamedTuple):
    """Hold the time of a step, and its expected times with and without its drafts."""

    took_s: float
    believed_s: float
    plain_s: float
    has_drafts: bool


class Probing:
    """Decide when to probe, and which draft tokens a probe verifies."""

    def __init__(self) -> None:
        self._drafted, self._plain = ProbeTimer(), ProbeTimer()
        self._saved_s = 0.0
        self._turn = 0
        self._is_probe = False  # whether the present step is a probe

    @property
    def wants_plain(self) -> bool:
        """Return whether the next step should have no drafts."""
        return self._plain.is_over

    @property
    def wants_draft(self) -> bool:
        """Return whether the next step should verify a draft, if any would pay when rows cost nothing."""
        return self._drafted.is_over and self._saved_s > 0

    def affords_trial(self, load: Load, curve: CostCurve) -> bool:
        price_s = curve.step_s(load.num_rows + TRIAL_TOKENS) - curve.step_s(load.num_rows)
        return self._saved_s > TRIAL_STEPS * price_s

    def pay(self, seconds: float, plain_s: float) -> None:
        """Spend saved time (negative: save it); `plain_s`: the time of a step without drafts."""
        self._saved_s = max(-MOST_SAVED * plain_s, min(MOST_SAVED * plain_s, self._saved_s - seconds))

    def pick(self, drafts: Sequence[Draft], load: Load, curve: CostCurve) -> list[Draft]:
        """Return the drafts to verify out of those that the policy rejected, most often none."""
        picked = self._trial(drafts) if self._saved_s > 0 else None
        if picked is None and self.wants_draft:
            picked = self._small(drafts, load, curve)
            if picked is None:
                self._drafted.retry()
        self._is_probe = picked is not None
        return [NOTHING] * len(drafts) if picked is None else picked

    def saw(self, step: Step | None, num_alike: int = 1) -> bool:
        """Record a decode step. None: the step had prompts, so its time tells nothing here. `num_alike`: the number of similar
        steps that this call stands for, itself included. Returns True if this step tells more than one of many."""
        is_probe, self._is_probe = self._is_probe, False
        if step is None:
            return False
        self.pay(-SHARE * step.took_s * num_alike, step.plain_s)
        ratio = step.took_s / step.believed_s
        is_off = not 1 / OUTLIER < ratio < OUTLIER
        if is_off:  # the curve changes
            self._drafted, self._plain = ProbeTimer(), ProbeTimer()
        if not step.has_drafts:
            self._drafted.step(num_alike)
            self._plain.learned(ratio) if self._plain.is_over else self._plain.again()
        elif is_probe:
            self.pay(max(0.0, step.took_s - step.plain_s), step.plain_s)
            self._drafted.learned(ratio)
        else:
            self._drafted.again()
            self._plain.step(num_alike)
        return is_probe or is_off

    def _trial(self, drafts: Sequence[Draft]) -> list[Draft] | None:
        if not any(draft.is_trial for draft in drafts):
            return None
        return [draft if draft.is_trial else NOTHING for draft in drafts]

    def _small(self, drafts: Sequence[Draft], load: Load, curve: CostCurve) -> list[Draft] | None:
        """Return the likeliest tokens; None where they would not pay even at no cost."""
        likeliest = sorted(
            [(-chance, number, index) for number, draft in enumerate(drafts) for index, chance in enumerate(draft.cumulative)]
        )
        if sum([-negative for negative, *_ in likeliest]) <= MARGIN * load.num_decoding:
            return None
        self._turn += 1
        wanted = [[False] * len(draft) for draft in drafts]
        for _, number, index in likeliest[: self._size(load, curve)]:
            wanted[number][index] = True
        return [draft.keep(keep) if any(keep) else NOTHING for draft, keep in zip(drafts, wanted, strict=True)]

    def _size(self, load: Load, curve: CostCurve) -> int:
        """Return the next size in turn, at most the largest that is expected to double the step's time."""
        most_s = 2 * curve.step_s(load.num_rows) + load.attention_s
        in_turn = SIZES[self._turn % len(SIZES)]
        return max([size for size in SIZES if size <= in_turn and curve.step_s(load.num_rows + size) <= most_s], default=SIZES[0])
