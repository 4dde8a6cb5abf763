"""How much of their drafts the next step verifies. Pure.

A step of n sequences and m drafted tokens gives n + Σ c tokens, c being the chance that a drafted token is kept, and takes
t(n + m). The drafted tokens are taken in the order of their chances (a token's chance is never above its parent's, so what is
taken hangs together), and as many as make (n + Σ c) / t the largest; none, where they would not raise it. In other words a draft
goes on until its cumulative chance falls under a threshold, and the threshold is what a token must bring at the moment: the cost
of one more row in tokens. It follows from the drafts beside it, from how many sequences share the step, and from the measured
curve (`cost_curve.py`); nobody sets it.

Prompts beside take their own time whatever is drafted, and a token that is kept saves its share of a later step, most often one
without them. So t is what the sequences that decode would take alone, and what drafts add to the step as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.engine.speculation.cost_curve import CostCurve
from pdmesh.engine.speculation.draft import NOTHING, Draft

MARGIN = 0.02
"""Share that speculation must promise to win: chances and costs are estimates, and a tie is not worth the risk."""


@dataclass(frozen=True)
class Load:
    """What the step computes without drafts: sequences that decode, tokens of prompts beside them, and what attention takes."""

    num_decoding: int
    num_prompt_tokens: int
    attention_s: float

    @property
    def num_rows(self) -> int:
        return self.num_decoding + self.num_prompt_tokens

    def plain_s(self, curve: CostCurve) -> float:
        """What those that decode would take alone."""
        return curve.step_s(self.num_decoding) + self.attention_s

    def drafted_s(self, curve: CostCurve, num_drafted: int) -> float:
        """And what so many tokens more add to the step, but for their attention."""
        return self.plain_s(curve) + curve.step_s(self.num_rows + num_drafted) - curve.step_s(self.num_rows)


@dataclass(frozen=True)
class Choice:
    """What to verify of each draft, in their order; `threshold`: the chance under which no token more would pay."""

    drafts: list[Draft]
    threshold: float
    num_expected: float  # tokens of drafts that are kept, on average
    gain: float = 0.0  # of these drafts, in steps without drafts: what their tokens are worth less what they take


def choose(drafts: Sequence[Draft], contexts: Sequence[int], load: Load, curve: CostCurve, max_tokens: int) -> Choice:
    """`contexts`: tokens known of each draft's sequence; `max_tokens`: of all drafts together."""
    plain_s = load.plain_s(curve)
    plain_rate, beside_s = load.num_decoding / plain_s, plain_s - curve.step_s(load.num_rows)
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
    """False: even `max_tokens` drafted tokens, all of `best_chance`, would not pay, nor would fewer."""
    plain_s = load.plain_s(curve)
    most = load.num_rows + max_tokens
    ends = [rows for rows in curve.rows if load.num_rows < rows < most]  # between points the rate only rises or only falls
    return any(
        (load.num_decoding + best_chance * (rows - load.num_rows)) * plain_s
        > (1 + MARGIN) * load.num_decoding * load.drafted_s(curve, rows - load.num_rows)
        for rows in (*ends, most)
    )


def threshold(rate: float, num_rows: int, curve: CostCurve) -> float:
    """The chance below which no drafted token pays: what a row more costs at least, in tokens that come at `rate` meanwhile."""
    return min(1.0, rate * curve.least_row_s(num_rows))


def fixed(drafts: Sequence[Draft], length: int) -> Choice:
    """The first `length` tokens of each draft's first branch, whatever they cost: what the threshold is compared with."""
    first = [draft.first(len(draft.branches[0])).first(length) if draft else NOTHING for draft in drafts]
    return Choice(first, 0.0, sum(sum(draft.cumulative) for draft in first))
