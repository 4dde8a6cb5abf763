"""Who guesses: the one interface of all proposers.

A proposer is asked before a step for all sequences that decode, and told after the step what became of each draft. What it
remembers of a sequence is its own, kept in a `WeakKeyDictionary`: sequences come and go without notice, may be preempted (then
their blocks are others afterwards) and may begin with any number of tokens, here or elsewhere computed. A proposer may be wrong
about anything but its bounds: it costs time, never a token. One that raises, or drafts beyond its bounds, is asked no more.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import NamedTuple, Protocol

from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import Draft, Verified


class Ask(NamedTuple):
    """One sequence that decodes: all its tokens but the last known one are computed (or forced by a grammar)."""

    sequence: Sequence
    max_depth: int  # at least 1: drafts that go further could not be used
    max_tokens: int  # of the whole tree
    least_chance: float = 0.0  # a token that is kept with a smaller chance than this is not worth its place in the step
    may_try: bool = False  # a trial (`Draft.is_trial`) may begin now


class Proposer(Protocol):
    """Named in configuration, metrics and usage."""

    @property
    def name(self) -> str: ...

    @property
    def is_free(self) -> bool:
        """Guessing takes microseconds, so it may always be asked; others run a model, and are asked where that may pay."""
        ...

    @property
    def wants_hidden(self) -> bool:
        """It guesses from the model's hidden states: see `learn`."""
        ...

    @property
    def learns(self) -> bool:
        """It wants to be told what the model drew; others find the new tokens in the sequence when they are asked next."""
        ...

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        """Return a draft for each, within its bounds; an empty one (`NOTHING`) where there is nothing to guess."""
        ...

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """What the model drew, whoever had made the draft. The sequence has its new tokens already, and may be over.

        `hidden` [hidden_size] float32: the model's last hidden state, before its final norm, that the last new token was drawn
        from; None unless `wants_hidden`.
        """
        ...


def promise(draft: Draft) -> float:
    """Return tokens of it that are kept, on average, if all of it is verified."""
    return sum(draft.cumulative)
