"""How long a step takes by the number of tokens that it computes: measured when the engine starts, corrected by every step.

A step that verifies drafts reads the weights once, as one without does, and computes more rows; from some number of rows on the
rows cost more than they bring. That curve decides how much is drafted. Only its shape matters, so a machine that is slower or
faster for a while does no harm.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise

LEARNING = 0.02
"""Weight of a step's time: once in the whole curve, as the machine may be faster or slower now, and once in the points beside the
step's number of rows. So what is seen of one point alone does not bend the curve, and what was not drafted for long is not dear
for ever."""
OUTLIER = 2.0
"""A step that took this much more than expected was held up by something else; one that took this much less shows that the
measurement was."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a step of rows[i] tokens, whose attention to a context of C tokens takes `context_s` · C more for a sequence's
    first token, and `row_context_s` · C for each further one of it. `rows` ascend from 1."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context_s: float = 0.0
    row_context_s: float = 0.0

    def step_s(self, num_rows: int) -> float:
        """Without attention. Beyond the last measured number of rows, in proportion to it."""
        last = len(self.rows) - 1
        if num_rows >= self.rows[last]:
            return self.seconds[last] * num_rows / self.rows[last]
        right = bisect_left(self.rows, num_rows)
        if right == 0:
            return self.seconds[0]
        share = (num_rows - self.rows[right - 1]) / (self.rows[right] - self.rows[right - 1])
        return self.seconds[right - 1] + share * (self.seconds[right] - self.seconds[right - 1])

    def least_row_s(self, num_rows: int) -> float:
        """What a row more takes where it takes least: the curve has steps, where another tile of a product begins, and behind
        one that is paid for rows are cheap."""
        points = zip(pairwise(self.rows), pairwise(self.seconds), strict=True)
        ahead = [(after - before) / (to - at) for (at, to), (before, after) in points if to > num_rows]
        return min([*ahead, self.seconds[-1] / self.rows[-1]])

    def saw(self, num_rows: int, attention_s: float, step_s: float) -> CostCurve:
        """Corrected by one step, whose attention is believed to have taken `attention_s`."""
        expected_s, actual_s = self.step_s(num_rows), step_s - attention_s
        if num_rows > self.rows[-1] or not 0 < actual_s < expected_s * OUTLIER:
            return self
        ratio = actual_s / expected_s
        if ratio < 1 / OUTLIER:
            return replace(self, seconds=tuple([ratio * point_s for point_s in self.seconds]))
        seconds = [point_s * (1 + LEARNING * (ratio - 1)) for point_s in self.seconds]
        right = bisect_left(self.rows, num_rows)
        for index in {max(0, right - 1), right}:
            gap = abs(self.rows[index] - num_rows) / max(1, self.rows[right] - self.rows[max(0, right - 1)])
            seconds[index] += LEARNING * max(0.0, 1.0 - gap) * (actual_s - expected_s)
        return replace(self, seconds=_rising(seconds, right))


def _rising(seconds: list[float], at: int) -> tuple[float, ...]:
    """More rows never take less: what was measured beside `at` gives way to it."""
    for index in range(at - 1, -1, -1):
        seconds[index] = min(seconds[index], seconds[index + 1])
    for index in range(at + 1, len(seconds)):
        seconds[index] = max(seconds[index], seconds[index - 1])
    return tuple(seconds)
