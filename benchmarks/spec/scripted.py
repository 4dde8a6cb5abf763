"""Proposers that know the answer: what speculation is worth at a given acceptance, and that wrong guesses change nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequence_

from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.proposer import Ask

GOLDEN = (math.sqrt(5) - 1) / 2
LEAST_CHANCE = 0.001
"""What is said of a wrong token: better than no draft, and worse than anybody's."""


class Scripted:
    """Proposes what each request (by id, a number) will answer; each token is right with probability `right`.

    `length` tokens a draft; who is to verify all of them gives the engine the same `draft_length`. How many of a draft's first
    tokens are right is spread as evenly over the drafts as can be, so that a short run has the acceptance that was asked for.
    """

    name = "scripted"
    is_free = True
    wants_hidden = False
    learns = False

    def __init__(self, right: float, length: int, vocab_size: int) -> None:
        self.right, self.length = right, length
        self.answers: Sequence_[Sequence_[int]] = ()
        self._vocab_size = vocab_size
        self._at = 0.5

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """It knows already."""

    def _draft(self, ask: Ask) -> Draft:
        request, start = ask.sequence.group.request, len(ask.sequence.output)
        answer = self.answers[int(request.request_id)][start : start + min(self.length, ask.max_depth)]
        self._at = (self._at + GOLDEN) % 1.0
        num_right = right_run(self.right, self._at)
        tokens = [token if place < num_right else (token + 1) % self._vocab_size for place, token in enumerate(answer)]
        chance = max(self.right, LEAST_CHANCE)
        return Draft.chain(tokens, [chance] * len(tokens), self.name) if tokens else NOTHING


def right_run(right: float, at: float) -> float:
    """How many tokens in a row are right before the first that is not, `at` in [0, 1) of all drafts ordered by that number,
    where each token is so with probability `right`: n or more in right^n of them."""
    if right in (0.0, 1.0):
        return math.inf if right else 0.0
    return math.floor(math.log(1.0 - at) / math.log(right))
