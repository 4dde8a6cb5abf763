"""What proposers share that read along and follow a trail: prompt lookup in the sequence itself, retrieval in others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import Draft, Verified
from pdmesh.engine.speculation.ngrams.token_history import Trail
from pdmesh.engine.speculation.proposer import Ask

PORTION = 2048
"""Tokens entered in a step, of all sequences: about 0.3 ms."""


class Reader(Protocol):
    """What is known of one sequence."""

    trail: Trail

    def read(self, output: list[int], most: int) -> int:
        """Takes the new tokens and looks where the trail leads now; returns how many were entered, at most `most`."""
        ...


class Reading:
    """A Proposer. It learns from the tokens that came, so that it knows what a draft is worth while nobody has any verified."""

    is_free = True
    wants_hidden = False
    learns = False

    def __init__(self, name: str, open_reader: Callable[[Sequence], Reader]) -> None:
        self.name = name
        self._open_reader = open_reader
        self._readers: WeakKeyDictionary[Sequence, Reader] = WeakKeyDictionary()

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        left = PORTION
        drafts: list[Draft] = []
        for ask in asks:
            sequence = ask.sequence
            reader = self._readers.get(sequence)
            if reader is None:
                reader = self._readers[sequence] = self._open_reader(sequence)
            left -= reader.read(sequence.output, left)
            drafts.append(reader.trail.draft(ask, self.name))
        return drafts

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """Nothing here: `propose` finds the new tokens in the sequence."""
