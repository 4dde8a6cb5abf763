"""A proposer that knows what the mock model will draw, and is wrong as often as it is told to be."""

from __future__ import annotations

import random
from collections.abc import Sequence as Sequence_

from torch import Tensor

from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import NOTHING, Draft, Verified
from pdmesh.engine.speculation.proposer import Ask
from tests.support.mock_engine import EOS, VOCAB_SIZE, mock_logits


class Guesser:
    """`right`: the share of its tokens that the model will draw. With `branches` a draft is a tree: beside each token another,
    wherever there is room. It is sure of what it guesses, so that whatever it proposes is verified."""

    name = "guesser"
    vocab_size = VOCAB_SIZE
    is_free = True
    learns = True

    def __init__(self, right: float, *, branches: bool = False, seed: int = 0, wants_hidden: bool = False) -> None:
        self.wants_hidden = wants_hidden
        self.learned: list[Verified] = []
        self.hidden: list[float] = []
        self.right, self.branches, self._random = right, branches, random.Random(seed)

    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        self.learned.append(verified)
        if hidden is not None:
            self.hidden.append(float(hidden[0]))

    def truth(self, sequence: Sequence, output: list[int]) -> int:
        """What the model draws behind this output."""
        return drawn(sequence, output)

    def _draft(self, ask: Ask) -> Draft:
        depth = self._random.randint(0, min(ask.max_depth, 6))
        if not depth:
            return NOTHING
        tree = _Tree()
        self._grow(tree, list(ask.sequence.output), ask, -1, depth)
        return tree.draft().first(ask.max_tokens)

    def _grow(self, tree: _Tree, output: list[int], ask: Ask, parent: int, depth: int) -> None:
        if not depth:
            return
        true = self.truth(ask.sequence, output)
        wrong = (true + 1 + self._random.randrange(self.vocab_size - 1)) % self.vocab_size
        first = true if self._random.random() < self.right else wrong
        for token_id in (first, true if first == wrong else wrong) if self.branches else (first,):
            node = tree.add(token_id, parent)
            self._grow(tree, [*output, token_id], ask, node, depth - 1 if token_id == first else min(1, depth - 1))


class _Tree:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []

    def add(self, token_id: int, parent: int) -> int:
        self.token_ids.append(token_id)
        self.parents.append(parent)
        return len(self.token_ids) - 1

    def draft(self) -> Draft:
        return Draft(tuple(self.token_ids), tuple(self.parents), (1.0,) * len(self.token_ids), "guesser")


def drawn(sequence: Sequence, output: list[int]) -> int:
    """What the mock model draws behind this output, whatever the sequence's own is by now."""
    request, [choice] = sequence.group.request, sequence.choices
    row = SampleRow(request.sampling, choice, len(output), request.prompt, output, frozenset({EOS}))
    [token] = Sampler().sample(mock_logits([*request.prompt, *output])[None], [row])
    return token.token_id
