"""The interface of all draft proposers.

A proposer is called before a step for all sequences that decode, and after the step with the result of each draft. Its state of
a sequence is its own, kept in a `WeakKeyDictionary`: sequences come and go without notice, may be preempted (then
their blocks change) and may begin with any number of tokens, computed here or elsewhere. A proposer may be wrong
about anything but its bounds: it costs time, never a token. One that raises, or exceeds its bounds, is not used again.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import NamedTuple, Protocol

from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import Draft, Verified


class Ask(NamedTuple):
    """Ask for a draft of one sequence that decodes: all its tokens but the last known one are computed (or forced by a
    grammar)."""

    sequence: Sequence
    max_depth: int  # at least 1: longer drafts cannot be used
    max_tokens: int  # of the whole tree
    least_chance: float = 0.0  # a token with a smaller chance is not worth a row of the step
    may_try: bool = False  # a trial (`Draft.is_trial`) may begin now


class Proposer(Protocol):
    """Draft tokens. Proposers are named in configuration, metrics and usage."""

    @property
    def name(self) -> str: ...

    @property
    def is_free(self) -> bool:
        """Return whether drafting takes microseconds, so that it may always be used; other proposers run a model, and are used
        where that may pay."""
        ...

    @property
    def wants_hidden(self) -> bool:
        """Return whether it drafts from the model's hidden states, which `learn` passes."""
        ...

    @property
    def learns(self) -> bool:
        """Return whether it needs the model's draws; other proposers find the new tokens in the sequence in the next call."""
        ...

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        """Return a draft for each ask, within its bounds; an empty one (`NOTHING`) where there is none."""
        ...

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """Learn from the model's draws, whichever proposer made the draft. The sequence has its new tokens, and may have ended.

        `hidden` [hidden_size] float32: the model's last hidden state, before its final norm, from which the last new token was
        drawn; None unless `wants_hidden`.
        """
        ...


def promise(draft: Draft) -> float:
    """Return the draft's expected number of accepted tokens, if all of it is verified."""
    return sum(draft.cumulative)
