"""What is verified, or left, only to learn what it takes. Pure: it is told what steps took.

The policy does what it believes to be best, so it learns nothing about what it never does. Two things are therefore done now and
then against its advice: where drafts were refused, a small one is verified; where drafts were verified in every step for long, a
step does without. Each is done less and less often while it only confirms what was believed.

    draft verified against advice     takes longer than the step without: paid from SHARE of the time that steps take
    step without drafts               gives fewer tokens: at most one step in LONGEST

Trials (`Draft.is_trial`) are paid from the same share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdmesh.engine.speculation.cost_curve import OUTLIER, CostCurve
from pdmesh.engine.speculation.draft import NOTHING, Draft
from pdmesh.engine.speculation.policy import MARGIN, Load

SHARE = 0.003
"""Of the time of all steps."""
MOST_SAVED = 8
"""Steps. What has not been spent for long is not spent at once."""
SHORTEST, LONGEST = 32, 256
"""Steps without a probe."""
RETRY = 4
CONFIRMED = 1.1
"""A step that took so many times what was believed, or more, or so small a part, was worth making."""
SIZES = (1, 2, 4, 8)
"""Drafted tokens, in turn."""
TRIAL_TOKENS, TRIAL_STEPS = 4, 8
"""A trial's whole price is to be there when it begins."""


class Wait:
    """Steps until the next probe of a kind."""

    def __init__(self) -> None:
        self._length = self._left = SHORTEST

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def step(self, count: int) -> None:
        self._left -= count

    def again(self) -> None:
        """There was no need for a probe."""
        self._left = self._length

    def retry(self) -> None:
        """There was nothing to probe with. Soon again: who runs a model is asked for a few steps in a row, then for long not."""
        self._left = RETRY

    def learned(self, ratio: float) -> None:
        """A probe took `ratio` times what was believed."""
        is_confirmed = 1 / CONFIRMED < ratio < CONFIRMED
        self._length = min(LONGEST, 2 * self._length) if is_confirmed else SHORTEST
        self._left = self._length


class Step(NamedTuple):
    """What a step took, and what was believed that it takes, with and without its drafts."""

    took_s: float
    believed_s: float
    plain_s: float
    has_drafts: bool


class Probing:
    def __init__(self) -> None:
        self._drafted, self._plain = Wait(), Wait()
        self._saved_s = 0.0
        self._turn = 0
        self._is_probe = False  # the step that is being made

    @property
    def wants_plain(self) -> bool:
        """The next step is to do without drafts."""
        return self._plain.is_over

    @property
    def wants_draft(self) -> bool:
        """The next step is to verify something, if there is anything that would pay if rows cost nothing."""
        return self._drafted.is_over and self._saved_s > 0

    def affords_trial(self, load: Load, curve: CostCurve) -> bool:
        price_s = curve.step_s(load.num_rows + TRIAL_TOKENS) - curve.step_s(load.num_rows)
        return self._saved_s > TRIAL_STEPS * price_s

    def pay(self, seconds: float, plain_s: float) -> None:
        """From what is saved; `plain_s`: a step without drafts."""
        self._saved_s = max(-MOST_SAVED * plain_s, min(MOST_SAVED * plain_s, self._saved_s - seconds))

    def pick(self, drafts: Sequence[Draft], load: Load, curve: CostCurve) -> list[Draft]:
        """Of drafts that the policy has refused: what is verified all the same, most often nothing."""
        picked = self._trial(drafts) if self._saved_s > 0 else None
        if picked is None and self.wants_draft:
            picked = self._small(drafts, load, curve)
            if picked is None:
                self._drafted.retry()
        self._is_probe = picked is not None
        return [NOTHING] * len(drafts) if picked is None else picked

    def saw(self, step: Step | None, num_alike: int = 1) -> bool:
        """What a step was that decodes. None: with prompts beside, whose times say nothing here. `num_alike`: this is told
        once for so many that were like it, itself included. True: this one says more than one of many."""
        is_probe, self._is_probe = self._is_probe, False
        if step is None:
            return False
        self.pay(-SHARE * step.took_s * num_alike, step.plain_s)
        ratio = step.took_s / step.believed_s
        is_off = not 1 / OUTLIER < ratio < OUTLIER
        if is_off:  # the curve will change, or has
            self._drafted, self._plain = Wait(), Wait()
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
        """The likeliest tokens; None where they would not pay if they cost nothing."""
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
        """As many as are next in turn, but no more than are believed to double the step."""
        most_s = 2 * curve.step_s(load.num_rows) + load.attention_s
        in_turn = SIZES[self._turn % len(SIZES)]
        return max([size for size in SIZES if size <= in_turn and curve.step_s(load.num_rows + size) <= most_s], default=SIZES[0])
