"""What a step with drafts takes besides its forward pass.

Such a step is planned, packed and applied anew, as is the one behind it; otherwise steps of the same sequences keep their plan
and their input (`SchedulerOutput.num_repeats`). With a small model that is a tenth of a step, so drafts of one or two tokens
rarely pay. It is measured, as time beyond what the cost curve expects, of three sorts of steps:

    PLAIN    without drafts, behind another one
    DRAFTED  with drafts
    BEHIND   without drafts, behind one with drafts
"""

from __future__ import annotations

from enum import Enum

FIRST = 0.05
"""Share of a step without drafts, until steps with drafts were seen."""
LEARNING = 1 / 16
MOST = 0.5
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
        more_s = max(-MOST * plain_s, min(MOST * plain_s, more_s))
        mean_s = self._more_s.setdefault(key, more_s)
        self._more_s[key] = mean_s + LEARNING * (more_s - mean_s)
        self._was_drafted = has_drafts

    def of_drafting(self, num_decoding: int, plain_s: float, *, has_prompts: bool) -> float:
        """Return how much longer the next step and the one behind it take if the next one has drafts, besides forward passes.

        Behind a step with drafts, the next step has no kept input in any case: drafting again only puts BEHIND's time off. Nor
        has it any beside prompts (`has_prompts`)."""
        bits = num_decoding.bit_length()
        plain_more_s, drafted_more_s = self._more_s.get((StepSort.PLAIN, bits)), self._more_s.get((StepSort.DRAFTED, bits))
        if plain_more_s is None or drafted_more_s is None:
            return FIRST * plain_s
        more_s = drafted_more_s - plain_more_s
        if not (self._was_drafted or has_prompts):
            more_s += self._more_s.get((StepSort.BEHIND, bits), plain_more_s) - plain_more_s
        return max(0.0, more_s)
