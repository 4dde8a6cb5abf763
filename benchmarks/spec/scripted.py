"""Proposers that know the answer: what speculation is worth at a given acceptance, and that wrong guesses change nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Sequence_

from torch import Tensor

from engine.sequence import Sequence
from engine.speculation.draft import NOTHING, Draft, Verified
from engine.speculation.proposer import Ask


class Scripted:
    """Proposes what each request (by id) will answer; each token is right with probability `right`, independently of others.

    `length` tokens a draft; who is to verify all of them gives the engine the same `draft_length`.
    """

    name = "scripted"
    is_free = True
    wants_hidden = False

    def __init__(self, right: float, length: int, vocab_size: int) -> None:
        self.right, self.length = right, length
        self.answers: Mapping[str, Sequence_[int]] = {}
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """It knows already."""

    def _draft(self, ask: Ask) -> Draft:
        request, start = ask.sequence.group.request, len(ask.sequence.output)
        answer = self.answers[request.request_id][start : start + min(self.length, ask.max_depth)]
        tokens = [token if self._random.random() < self.right else (token + 1) % self._vocab_size for token in answer]
        return Draft.chain(tokens, [self.right] * len(tokens), self.name) if tokens else NOTHING
