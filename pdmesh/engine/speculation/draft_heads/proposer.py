"""The proposer with draft heads: it drafts from the model's last hidden state, without any KV.

Its only state of a sequence is the hidden state from which its last token was drawn; a sequence that comes from elsewhere is
drafted for from its second step on. Recurrent heads draft a chain, token by token; Medusa heads all positions at once, for a
greedy sequence as a tree. A token is drawn as the model will draw it, with the noise of its position and the request's
parameters, so that sampled outputs are predicted as often as the heads' distribution is the model's; only grammars are ignored.

The chance of a token is how likely the model draws it, too, if its logits are nearly the heads' (acceptance_rate.py; for a greedy
sequence the heads' own probability). It ranks drafts well, but is no frequency: the policy's caller compares it with
the results of earlier drafts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from collections.abc import Sequence as Sequence_
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.engine.request import end_tokens
from pdmesh.engine.runner.model_runner import TokenSampler
from pdmesh.engine.sampling.sampler import SampleRow
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.acceptance_rate import chance_of
from pdmesh.engine.speculation.draft import NOTHING, ROOT, Draft, Verified
from pdmesh.engine.speculation.draft_heads.reference import HeadMaths, Root
from pdmesh.engine.speculation.proposer import Ask

# The tree out of independent predictions (Medusa heads) that has the most expected accepted tokens


Guesses = Sequence_[Sequence_[tuple[int, float]]]  # by depth: tokens and their chances, the likeliest first


def best_tree(guesses: Guesses, max_tokens: int, least_chance: float, proposer: str) -> Draft:
    """Return the `max_tokens` nodes with the largest chance to be accepted, none below `least_chance`; a node's chance is the
    product of its branch's. A node is never likelier than its parent, so best first finds them (Li et al., EAGLE-2, 2024)."""
    nodes: list[tuple[int, int, float]] = []  # parent, token, the token's own chance
    heap: list[tuple[float, int, int, int]] = []  # minus the chance to be accepted, parent, depth, rank at that depth

    def offer(kept: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(guesses) and rank < len(guesses[depth]) and (chance := kept * guesses[depth][rank][1]) >= least_chance:
            heapq.heappush(heap, (-chance, parent, depth, rank))

    offer(1.0, ROOT, 0, 0)
    while heap and len(nodes) < max_tokens:
        minus_chance, parent, depth, rank = heapq.heappop(heap)
        token_id, own_chance = guesses[depth][rank]
        nodes.append((parent, token_id, own_chance))
        if own_chance > 0:
            offer(-minus_chance / own_chance, parent, depth, rank + 1)
        offer(-minus_chance, len(nodes) - 1, depth + 1, 0)
    return _depth_first(nodes, proposer) if nodes else NOTHING


def _depth_first(nodes: list[tuple[int, int, float]], proposer: str) -> Draft:
    """Return nodes, given in the order in which they were found, in the order of a Draft."""
    children: dict[int, list[int]] = {}
    for index, (parent, _, _) in enumerate(nodes):
        children.setdefault(parent, []).append(index)
    place, waiting = {ROOT: ROOT}, children.get(ROOT, [])[::-1]
    while waiting:
        index = waiting.pop()
        place[index] = len(place) - 1
        waiting += children.get(index, [])[::-1]
    order = [index for index in place if index != ROOT]
    return Draft(
        tuple(nodes[index][1] for index in order),
        tuple(place[nodes[index][0]] for index in order),
        tuple(nodes[index][2] for index in order),
        proposer,
    )


NAME = "heads"
_MOST_SIBLINGS = 4  # children of a tree's node: a token less likely than four others is hardly ever drawn


class _Memory(NamedTuple):
    """Hold a sequence's state. `hidden` [H]: the last of the output's `length` tokens was drawn from it."""

    length: int
    hidden: Tensor


class _Branch:
    """Hold the draft of one sequence while it grows."""

    def __init__(self, ask: Ask, eos_token_ids: frozenset[int], max_depth: int) -> None:
        sequence, request = ask.sequence, ask.sequence.group.request
        self.ask = ask
        self.tokens: list[int] = []
        self.chances: list[float] = []
        self.kept = 1.0  # the product of the chances
        self.most = min(ask.max_depth, ask.max_tokens, max_depth)
        self.last = sequence.output[-1]
        self._request, self._choice, self._eos = request, sequence.choices[0], eos_token_ids
        self._ends = end_tokens(request.sampling, eos_token_ids)
        self.is_plain = self.row().is_plain  # then every later row is plain

    def root(self, hidden: Tensor) -> Root:
        return Root(hidden, self.last, self.most, self.ask.least_chance)

    def row(self) -> SampleRow:
        """Return the row of the next draft token."""
        output = self.ask.sequence.output
        return SampleRow(
            params=self._request.sampling,
            choice=self._choice,
            index=len(output) + len(self.tokens),
            prompt=self._request.prompt,
            output=[*output, *self.tokens] if self.tokens else output,
            eos_token_ids=self._eos,
        )

    def take(self, token_id: int, chance: float) -> bool:
        """Append a token, if its chance is large enough; False: the draft ends here."""
        if not _is_number(chance) or self.kept * chance < self.ask.least_chance:
            return False
        self.tokens.append(token_id)
        self.chances.append(chance)
        self.kept *= chance
        self.last = token_id
        return len(self.tokens) < self.most and token_id not in self._ends

    def take_all(self, tokens: list[int], chances: list[float]) -> None:
        """Append a whole draft, up to a token that ends the output, or to where too large weights give no numbers."""
        for token_id, chance in zip(tokens, chances, strict=True):
            if not _is_number(chance):
                break
            self.tokens.append(token_id)
            self.chances.append(chance)
            if token_id in self._ends:
                break

    def draft(self) -> Draft:
        return Draft.chain(self.tokens, self.chances, NAME) if self.tokens else NOTHING


class HeadProposer:
    """Draft by heads; implements Proposer."""

    name, is_free, wants_hidden, learns = NAME, False, True, True

    def __init__(
        self,
        maths: HeadMaths,
        sampler: TokenSampler,
        vocab_size: int,
        eos_token_ids: Collection[int],
        device: torch.device | None = None,
    ) -> None:
        """Create it. `sampler`: the model's, so that tokens are drawn like the model's own; `device`: where it draws; None: the
        CPU."""
        self._maths, self._sampler, self._vocab_size = maths, sampler, vocab_size
        self._device = device or torch.device("cpu")
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ids: list[int] = maths.heads.token_ids.tolist()
        self._places: NDArray[np.int64] = maths.heads.token_ids.numpy()
        self._full = torch.empty((0, vocab_size))
        self._memories: WeakKeyDictionary[Sequence, _Memory] = WeakKeyDictionary()

    def learn(self, sequence: Sequence, verified: Verified, hidden: Tensor | None) -> None:
        """Keep the hidden state. Behind what a grammar forced there is none that its last token was drawn from."""
        if hidden is None or not sequence.output or sequence.output[-1] != verified.new_tokens[-1]:
            self._memories.pop(sequence, None)
        else:
            self._memories[sequence] = _Memory(len(sequence.output), hidden)  # not copied: each step has a buffer of its own

    @torch.inference_mode()
    def propose(self, asks: Sequence_[Ask]) -> list[Draft]:
        drafts = [NOTHING] * len(asks)
        known = [(i, memory.hidden) for i, ask in enumerate(asks) if (memory := self._memory(ask.sequence)) is not None]
        if not known:
            return drafts
        branches = [_Branch(asks[i], self._eos_token_ids, self._maths.heads.depth) for i, _ in known]
        guess = self._chains if self._maths.heads.kind == "recurrent" else self._trees
        for (i, _), draft in zip(known, guess(branches, [hidden for _, hidden in known]), strict=True):
            drafts[i] = draft
        return drafts

    def hidden(self, sequence: Sequence) -> Tensor | None:
        """Return the state for a hand-off: [H] float32."""
        memory = self._memory(sequence)
        return None if memory is None else memory.hidden

    def restore(self, sequence: Sequence, hidden: Tensor) -> None:
        """Take over the state from which the last token of the sequence was drawn, elsewhere."""
        self._memories[sequence] = _Memory(len(sequence.output), hidden)

    def _memory(self, sequence: Sequence) -> _Memory | None:
        memory = self._memories.get(sequence)
        return memory if memory is not None and memory.length == len(sequence.output) else None

    def _chains(self, branches: list[_Branch], hidden: list[Tensor]) -> list[Draft]:
        """Draft chains: those of greedy sequences all at once, the others token by token."""
        if plain := [i for i, branch in enumerate(branches) if branch.is_plain]:
            found = self._maths.chains([branches[i].root(hidden[i]) for i in plain])
            for i, (tokens, chances) in zip(plain, found, strict=True):
                branches[i].take_all(tokens, chances)
        if drawn := [i for i, branch in enumerate(branches) if not branch.is_plain]:
            self._draw_chains([branches[i] for i in drawn], [hidden[i] for i in drawn])
        return [branch.draft() for branch in branches]

    def _draw_chains(self, growing: list[_Branch], hidden: list[Tensor]) -> None:
        states = self._maths.begin(hidden)
        while growing:
            states = self._maths.advance(0, states, [branch.last for branch in growing])
            guesses = self._draw(self._maths.score(states).logits, growing)
            goes_on = [branch.take(*guess) for branch, guess in zip(growing, guesses, strict=True)]
            if not all(goes_on):
                states = states[[i for i, does in enumerate(goes_on) if does]]
                growing = [branch for branch, does in zip(growing, goes_on, strict=True) if does]

    def _trees(self, branches: list[_Branch], hidden: list[Tensor]) -> list[Draft]:
        """Draft trees: all positions of all sequences are scored in one product."""
        states = self._maths.begin(hidden)
        depth, tokens = max(branch.most for branch in branches), [branch.last for branch in branches]
        logits = self._maths.score(torch.cat([self._maths.advance(number, states, tokens) for number in range(depth)])).logits
        rows = [range(i, depth * len(branches), len(branches)) for i in range(len(branches))]
        return [self._tree(branch, logits, mine[: branch.most]) for branch, mine in zip(branches, rows, strict=True)]

    def _tree(self, branch: _Branch, logits: Tensor, rows: Sequence_[int]) -> Draft:
        """Return the tree of one sequence; `rows` of the logits: the positions after the sequence, in order."""
        if branch.is_plain:
            best = logits[list(rows)].softmax(-1).topk(min(_MOST_SIBLINGS, len(self._ids)))
            found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            guesses = [[(self._ids[at], chance) for at, chance in zip(*place, strict=True)] for place in found]
            return best_tree(guesses, branch.ask.max_tokens, branch.ask.least_chance, NAME)
        for row in rows:
            [guess] = self._draw(logits[row : row + 1], [branch])
            if not branch.take(*guess):
                break
        return branch.draft()

    def _draw(self, scores: Tensor, branches: list[_Branch]) -> list[tuple[int, float]]:
        """Draw from scores [n, V'] the next token of each branch, with the noise of its position as from a model without other
        tokens, and return it with its chance."""
        logits, rows = scores.numpy(), [branch.row() for branch in branches]
        is_good = np.isfinite(logits).all(axis=1)  # infinity or NaN of too large weights are not drafted
        # numpy: operators of torch that have this many elements wake its threads, which wait for those that compute steps.
        full = self._room(len(rows))
        full.numpy()[:, self._places] = np.where(is_good[:, None], logits, np.float32(0.0))
        tokens = [max(0, token.token_id) for token in self._sampler.sample(full.to(self._device), rows)]
        places = np.searchsorted(self._places, tokens)
        chances = [
            chance_of(logits[i], place, row, self._places) if is_good[i] else 0.0
            for i, (place, row) in enumerate(zip(places, rows, strict=True))
        ]
        return list(zip(tokens, chances, strict=True))

    def _room(self, num_rows: int) -> Tensor:
        """Return [num_rows, vocab] float32, -inf where no head scores: it is written once and reused."""
        if len(self._full) < num_rows:
            self._full = torch.from_numpy(np.full((num_rows, self._vocab_size), -np.inf, np.float32))
        return self._full[:num_rows]


def _is_number(chance: float) -> bool:
    """Return whether it is a number; too large weights give zero, infinity or NaN."""
    return 0.0 < chance < math.inf
