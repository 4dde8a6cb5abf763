"""The cost curve: how long a step takes by the number of tokens that it computes. It is measured at start, corrected by steps.

A step that verifies drafts reads the weights once, like one without, and computes more rows; from some number of rows on the
rows cost more than they gain. The curve decides how much is drafted. Its shape matters more than its height: a machine that is
slower for a while is slower for all numbers of rows. So a step's time moves the whole curve, and bends it a little. Where a point
was not updated for long, a step bends it at once. A time that is far off is one of three things:

    longer once             the step was delayed: ignored
    longer again and again  while steps between them take the expected time: the point is wrong, or attention, if the others have
                            short contexts. While no other step does: the machine is slower
    shorter                 right behind a step of another kind that took the expected time: this point was too high, and those
                            of more rows, or attention. Else the whole curve was, because nothing makes a step shorter
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

LEARNING = 0.02
"""Weight of a step's time in the points beside its number of rows, and twice that in the whole curve."""
FIRST_LEARNING = 0.5
"""Weight of the first step in the whole curve, of the second one half of that, and so on: it was measured at another time."""
STALE_LEARNING = 0.5
STALE_AFTER = 32
"""Steps after which a kind is stale: it is then learned from few steps, and says nothing about the machine's speed."""
OUTLIER = 2.0
"""A step is an outlier if it took this many times the expected time, or the inverse part of it."""
PATIENCE = 3
"""This many steps of a kind in a row that took much longer are no outliers, if one of another kind between them did not."""
LONG_PATIENCE = 8
"""Without such a step it may be the machine that is held up, for a tenth of a second: so many are none."""
WITNESSES = 16
"""How many of the last steps are searched for one of another kind, which shows whether the machine is slower."""
BEYOND = 1.25
"""A step of this many times the rows of the last point makes another point."""


SHORTEST_S = 1e-6
"""Least time of a step."""
LONG_CONTEXT = 0.125
"""A step is long if attention takes at least this part of the rest: such steps are a kind of their own among those of as many
rows."""


class Kind(NamedTuple):
    """Describe a kind of steps: the point of the curve at or after their number of rows; whether attention takes much of their
    time."""

    point: int
    is_long: bool


class Seen(NamedTuple):
    """Hold the state of a kind: the number of its last step, how many of its steps in a row took much longer than expected, and
    how many times as long the shortest of those took."""

    at: int = 0
    num_late: int = 0
    least_late: float = 0.0


@dataclass(frozen=True)
class History:
    """Hold the history of the steps that updated a curve. `latest`: the kinds of the last ones, and whether they took about the
    expected time."""

    num_steps: int = 0
    seen: Mapping[Kind, Seen] = field(default_factory=dict)
    latest: tuple[tuple[Kind, bool], ...] = ()

    def of(self, kind: Kind) -> Seen:
        return self.seen.get(kind, Seen())

    def after(self, kind: Kind, num_late: int = 0, least_late: float = 0.0) -> History:
        """Return the history one step later, which was of this kind."""
        number = self.num_steps + 1
        seen = {**self.seen, kind: Seen(number, num_late, least_late)}
        return History(number, seen, (*self.latest, (kind, not num_late))[-WITNESSES:])

    def witness(self, kind: Kind) -> Kind | None:
        """Return the kind of the latest step of another kind, if it took the expected time."""
        other = next(((other, fitted) for other, fitted in reversed(self.latest) if other != kind), None)
        return other[0] if other is not None and other[1] else None

    def is_behind_another(self, kind: Kind) -> bool:
        """Return whether the latest step was of another kind, and took the expected time."""
        return bool(self.latest) and self.latest[-1][0] != kind and self.latest[-1][1]

    def is_late_alone(self, kind: Kind) -> bool:
        """Return whether a step of another kind has taken the expected time since this kind is late."""
        for num_late, (other, fitted) in enumerate(reversed(self.latest)):
            if other != kind:
                return fitted and num_late < self.of(kind).num_late
        return False


@dataclass(frozen=True)
class CostCurve:
    """Hold the seconds of a step of rows[i] tokens, whose attention to a context of C tokens takes `context_s` · C more for a
    sequence's first token, and `row_context_s` · C for each further one of it. `rows` ascend from 1."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context_s: float = 0.0
    row_context_s: float = 0.0
    history: History = History()

    def step_s(self, num_rows: int) -> float:
        """Return the seconds without attention. Beyond the last measured number of rows the curve is extrapolated."""
        last = len(self.rows) - 1
        if num_rows >= self.rows[last]:
            return self.seconds[last] + self._last_row_s * (num_rows - self.rows[last])
        right = bisect_left(self.rows, num_rows)
        if right == 0:
            return self.seconds[0]
        share = (num_rows - self.rows[right - 1]) / (self.rows[right] - self.rows[right - 1])
        return self.seconds[right - 1] + share * (self.seconds[right] - self.seconds[right - 1])

    def least_row_s(self, num_rows: int) -> float:
        """Return the least cost of one more row: the curve has steps, where another tile of a product begins, and
        beyond such a step rows are cheap."""
        points = zip(pairwise(self.rows), pairwise(self.seconds), strict=True)
        ahead = [(after - before) / (to - at) for (at, to), (before, after) in points if to > num_rows]
        return min([*ahead, self._last_row_s])

    @property
    def _last_row_s(self) -> float:
        if len(self.rows) == 1:
            return self.seconds[0] / self.rows[0]
        return (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])

    def scaled(self, factor: float) -> CostCurve:
        """Return the curve of a machine on which everything takes so many times as long."""
        return self._scaled(factor, 0.0)._scaled(factor, 1.0)

    def saw(self, num_rows: int, attention_s: float, step_s: float) -> CostCurve:
        """Return the curve corrected by one step, whose attention is expected to have taken `attention_s`. An error is attributed
        to attention by its share of the step: steps with short contexts correct the curve, those with long ones both."""
        if step_s < SHORTEST_S:
            return self
        if num_rows >= BEYOND * self.rows[-1]:
            return self._reaching(num_rows).saw(num_rows, attention_s, step_s)
        believed_s = self.step_s(num_rows)
        kind = Kind(min(bisect_left(self.rows, num_rows), len(self.rows) - 1), attention_s > LONG_CONTEXT * believed_s)
        ratio = step_s / (believed_s + attention_s)
        if ratio > OUTLIER:
            return self._late(kind, num_rows, attention_s, ratio)
        if ratio < 1 / OUTLIER and self.history.is_behind_another(kind):
            curve = self._put_right(kind, num_rows, attention_s, ratio)
        elif ratio < 1 / OUTLIER:
            curve = self._scaled(ratio, attention_s / (believed_s + attention_s))
        else:
            curve = self._bent(kind, num_rows, attention_s, ratio)
        return replace(curve, history=self.history.after(kind))

    def _late(self, kind: Kind, num_rows: int, attention_s: float, ratio: float) -> CostCurve:
        """Return the curve after a step that took `ratio` times the expected time: corrected, if enough of its kind did."""
        seen = self.history.of(kind)
        num_late, least_late = seen.num_late + 1, min(ratio, seen.least_late or ratio)
        if num_late < (PATIENCE if self.history.is_late_alone(kind) else LONG_PATIENCE):
            return replace(self, history=self.history.after(kind, num_late, least_late))
        if self.history.is_late_alone(kind):
            curve = self._put_right(kind, num_rows, attention_s, least_late)
        else:
            curve = self._scaled(least_late, attention_s / (self.step_s(num_rows) + attention_s))
        return replace(curve, history=self.history.after(kind))

    def _put_right(self, kind: Kind, num_rows: int, attention_s: float, ratio: float) -> CostCurve:
        """Correct the part that this kind of step does not share with the latest one that took the expected time."""
        witness, believed_s = self.history.witness(kind), self.step_s(num_rows)
        assert witness is not None, "its callers have seen one"
        step_s = ratio * (believed_s + attention_s)
        if kind.is_long and not witness.is_long:
            return self._scaled(max(LEARNING, (step_s - believed_s) / attention_s), 1.0)
        if ratio > 1.0:
            return self._moved(kind.point, num_rows, step_s - attention_s - believed_s)
        return self._cheaper_from(kind.point, max(LEARNING, (step_s - attention_s) / believed_s))

    def _bent(self, kind: Kind, num_rows: int, attention_s: float, ratio: float) -> CostCurve:
        believed_s = self.step_s(num_rows)
        share = attention_s / (believed_s + attention_s)
        more_s = (1 - share) * (ratio - 1) * believed_s
        if self.history.num_steps - self.history.of(kind).at > STALE_AFTER:
            return self._moved(kind.point, num_rows, STALE_LEARNING * more_s)
        of_all = max(2 * LEARNING, FIRST_LEARNING / (1 + self.history.num_steps))
        return self._scaled(1 + of_all * (ratio - 1), share)._moved(kind.point, num_rows, LEARNING * more_s)

    def _scaled(self, factor: float, attention_share: float) -> CostCurve:
        """Scale the curve for a slower or faster machine; or attention, as far as it has a share in the step."""
        of_curve, of_attention = 1 + (1 - attention_share) * (factor - 1), 1 + attention_share * (factor - 1)
        return replace(
            self,
            seconds=tuple([of_curve * point_s for point_s in self.seconds]),
            context_s=of_attention * self.context_s,
            row_context_s=of_attention * self.row_context_s,
        )

    def _moved(self, index: int, num_rows: int, more_s: float) -> CostCurve:
        """Make a step of `num_rows` take so much longer: the points beside it move, the nearer one more."""
        seconds, before = list(self.seconds), max(0, index - 1)
        width = max(1, self.rows[index] - self.rows[before])
        near = min(1.0, max(0.0, (num_rows - self.rows[before]) / width)) if index else 1.0
        weights = {index: near} if index == before else {before: 1.0 - near, index: near}
        whole = sum(weight * weight for weight in weights.values())
        for point, weight in weights.items():
            seconds[point] = max(seconds[point] + weight / whole * more_s, LEARNING * seconds[point])
        return replace(self, seconds=rising(seconds, index))

    def _cheaper_from(self, index: int, factor: float) -> CostCurve:
        """Make a point, and those of more rows, take so many times as long: as those before it at least."""
        least_s = self.seconds[index - 1] if index else 0.0
        cheaper = [max(least_s, factor * point_s) for point_s in self.seconds[index:]]
        return replace(self, seconds=(*self.seconds[:index], *cheaper))

    def _reaching(self, num_rows: int) -> CostCurve:
        return replace(self, rows=(*self.rows, num_rows), seconds=(*self.seconds, self.step_s(num_rows)))


def rising(seconds: list[float], at: int) -> tuple[float, ...]:
    """Make times ascend: more rows never take less, so what was measured beside `at` is adjusted."""
    for index in range(at - 1, -1, -1):
        seconds[index] = min(seconds[index], seconds[index + 1])
    for index in range(at + 1, len(seconds)):
        seconds[index] = max(seconds[index], seconds[index - 1])
    return tuple(seconds)


# What a step with drafts takes besides its forward pass.
#
# Such a step is planned, packed and applied anew, as is the one behind it; otherwise steps of the same sequences keep their plan
# and their input (`SchedulerOutput.num_repeats`). With a small model that is a tenth of a step, so drafts of one or two tokens
# rarely pay. It is measured, as time beyond what the cost curve expects, of three sorts of steps:
#
#     PLAIN    without drafts, behind another one
#     DRAFTED  with drafts
#     BEHIND   without drafts, behind one with drafts


HANDLING_FIRST = 0.05
"""Share of a step without drafts, until steps with drafts were seen."""
HANDLING_FIRST_WEIGHT, HANDLING_MEMORY = 2.0, 16.0
"""The assumption counts for so many steps; and about so many of the last steps decide: the first ones touch new memory."""
HANDLING_MOST = 0.5
"""Share of a step that counts at most: the machine was busy, or the curve is wrong."""


class StepSort(Enum):
    """Distinguish steps by what is kept from the one before."""

    PLAIN = "plain"
    DRAFTED = "drafted"
    BEHIND = "behind"


class HandlingCost:
    """Track means by sort and number of sequences. It belongs to the engine thread."""

    def __init__(self) -> None:
        self._more_s: dict[tuple[StepSort, int], float] = {}  # by the bits of the number of sequences
        self._weights: dict[tuple[StepSort, int], float] = {}
        self._was_drafted = False

    def sort_of_next(self, *, has_drafts: bool) -> StepSort:
        """Return the sort of the step that follows the last one which `saw` or `passed` recorded."""
        if has_drafts:
            return StepSort.DRAFTED
        return StepSort.BEHIND if self._was_drafted else StepSort.PLAIN

    def passed(self, *, has_drafts: bool) -> None:
        """Record a step whose time tells nothing."""
        self._was_drafted = has_drafts

    def saw(self, num_decoding: int, more_s: float, plain_s: float, *, has_drafts: bool) -> None:
        """Record a step: `more_s` beyond what the curve expects of its forward pass, negative where it took less; `plain_s`: the
        time of one without drafts."""
        key = (self.sort_of_next(has_drafts=has_drafts), num_decoding.bit_length())
        mean_s = self._more_s.get(key, HANDLING_FIRST * plain_s if has_drafts else 0.0)
        weight = self._weights[key] = min(HANDLING_MEMORY, self._weights.get(key, HANDLING_FIRST_WEIGHT) + 1.0)
        self._more_s[key] = mean_s + (max(-HANDLING_MOST * plain_s, min(HANDLING_MOST * plain_s, more_s)) - mean_s) / weight
        self._was_drafted = has_drafts

    def of_drafting(self, num_decoding: int, plain_s: float, *, has_prompts: bool) -> float:
        """Return how much longer the next step and the one behind it take if the next one has drafts, besides forward passes.

        Behind a step with drafts, the next step has no kept input in any case: drafting again only puts BEHIND's time off. Nor
        has it any beside prompts (`has_prompts`), and the one behind it has none either."""
        bits = num_decoding.bit_length()
        drafted_more_s = self._more_s.get((StepSort.DRAFTED, bits))
        plain_more_s = self._more_s.get((StepSort.PLAIN, bits), 0.0)  # while all steps have drafts there is none
        if drafted_more_s is None:
            return HANDLING_FIRST * plain_s
        behind_more_s = self._more_s.get((StepSort.BEHIND, bits), plain_more_s)
        if has_prompts:
            return max(0.0, drafted_more_s - behind_more_s)
        putting_off_s = 0.0 if self._was_drafted else behind_more_s - plain_more_s
        return max(0.0, drafted_more_s - plain_more_s + putting_off_s)
