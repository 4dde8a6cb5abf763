"""A guard around a proposer: a faulty proposer costs drafts, never the engine.

Exceptions of the proposer end here, and a draft that breaks its bounds counts as one: the proposer is not used again. Chances
that are only too high are scaled down (`CalibratedRate`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequence_
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.acceptance_rate import CalibratedRate
from pdmesh.engine.speculation.draft import NOTHING, ROOT, Draft, Verified
from pdmesh.engine.speculation.handover import TakesOver
from pdmesh.engine.speculation.proposer import Ask, Proposer

# Drafts under a grammar: the tokens that may come after each draft token, and the part of a draft that the grammar allows
#
# The sequence keeps the matchers that were requested (`Sequence.matcher_behind`), and a matcher keeps the tokens that may come
# after it. So the step that draws reuses what was computed to cut a draft, however much of the draft was cut off in between.


def allowed_on_tree(sequence: Sequence, draft: Draft) -> list[Bits | None]:
    """Return the tokens that may come after the root, then after each token of a draft that follows the grammar; None without a
    grammar."""
    nodes = range(ROOT, len(draft))
    if sequence.group.request.grammar is None:
        return [None for _ in nodes]
    return [sequence.matcher_behind(_path(draft, node)).allowed() for node in nodes]


def follow(sequence: Sequence, draft: Draft) -> Draft:
    """Return the part of the draft that the sequence's grammar allows: all of it without one."""
    if sequence.group.request.grammar is None or not draft:
        return draft
    here = sequence.matcher_behind(())
    wanted = [False] * len(draft)
    for run in draft.branches:
        path = draft.branch(run[-1])  # from the root on: a run begins after another's token
        for index in path[: here.num_possible([draft.token_ids[index] for index in path])]:
            wanted[index] = True
    return draft.keep(wanted)


def _path(draft: Draft, node: int) -> tuple[int, ...]:
    """Return the tokens from below the root to this one, itself included."""
    return tuple([draft.token_ids[index] for index in draft.branch(node)])


logger = logging.getLogger(__name__)


Lesson = tuple[Sequence, Verified, Tensor | None]
"""See Proposer.learn."""


class GuardedProposer:
    """Wrap a proposer, and never raise."""

    def __init__(self, proposer: Proposer, vocab_size: int | None, on_fault: Callable[[str], None]) -> None:
        """Wrap `proposer`. `vocab_size`: token ids are below it; None: unknown. `on_fault(name)` is called once."""
        self.name, self.is_free, self.wants_hidden = proposer.name, proposer.is_free, proposer.wants_hidden
        self.learns = proposer.learns
        self.is_open = True
        self._proposer, self._vocab_size, self._on_fault = proposer, vocab_size, on_fault
        self._trust, self._factor = CalibratedRate(), 1.0

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        """Return drafts, cut to what grammars allow before anything uses them."""
        with self._watched():
            drafts = self._proposer.propose(asks)
            checked = [self._checked(ask, draft) for ask, draft in zip(asks, drafts, strict=True)]
            return [follow(ask.sequence, draft) for ask, draft in zip(asks, checked, strict=True)]
        return [NOTHING] * len(asks)

    def believed(self, drafts: list[Draft]) -> list[Draft]:
        """Return `drafts` with their chances scaled by the recent acceptance rate."""
        factor = self._factor = self._trust.factor
        if factor == 1.0:
            return drafts
        return [replace(draft, chances=tuple([factor * chance for chance in draft.chances])) for draft in drafts]

    def judge(self, verified: Verified) -> None:
        """Record the result of one of its drafts, with the chances of this step."""
        draft, reached = verified.draft, {ROOT, *verified.kept}
        for index, parent in enumerate(draft.parents):
            if parent in reached:
                self._trust.saw(draft.chances[index] / self._factor, index in reached)

    def forgive(self, num_steps: int) -> None:
        """Let the scale of the chances recover, after so many steps."""
        self._trust.forgive(num_steps)

    def learn(self, lessons: Sequence_[Lesson]) -> None:
        """Pass on the results of the sequences of a step."""
        with self._watched():
            learn = self._proposer.learn
            for lesson in lessons:
                learn(*lesson)

    def restore(self, sequence: Sequence, hidden: Tensor) -> None:
        """Pass on to `TakesOver.restore`, if the proposer has it."""
        if isinstance(self._proposer, TakesOver):
            with self._watched():
                self._proposer.restore(sequence, hidden)

    def _checked(self, ask: Ask, draft: Draft) -> Draft:
        if not len(draft):  # raises for what is not a draft
            return NOTHING
        if draft.proposer != self.name:
            raise ValueError(f"proposer: {draft.proposer!r} in a draft of {self.name!r}")
        if why := draft.why_not(ask.max_depth, ask.max_tokens, self._vocab_size):
            raise ValueError(why)
        if max(draft.chances) > 1.0:  # exceeds 1 by rounding
            return replace(draft, chances=tuple([min(1.0, chance) for chance in draft.chances]))
        return draft

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.is_open = False
            logger.exception("speculation: %s has failed and is not asked again; the engine goes on without it", self.name)
            self._on_fault(self.name)
