"""Draft heads computed with torch: on any device, and the reference of native.py.

Training (tools/draft_heads) uses the same two functions, so what is learned is what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.speculation.draft_heads.weights import Block, DraftHeads

EPS = 1e-6


class Scores(NamedTuple):
    """Hold `logits` [n, V'] float32 of n states over the reduced vocabulary, valid until the next call; the best one's
    column and its probability."""

    logits: Tensor
    best: list[int]
    chances: list[float]


class Root(NamedTuple):
    """Hold what a chain begins with: the model's last hidden state [H] float32, the token drawn from it, and its bounds."""

    hidden: Tensor
    last: int
    most: int
    least_chance: float


Chain = tuple[list[int], list[float]]  # tokens and their chances


class HeadMaths(Protocol):
    """Compute draft heads, as the proposer needs it."""

    heads: DraftHeads

    def begin(self, hidden: Sequence[Tensor]) -> Tensor:
        """Map the model's last hidden states, n of [H] float32, before its final norm -> states [n, H]."""
        ...

    def advance(self, number: int, states: Tensor, token_ids: list[int]) -> Tensor:
        """Apply block `number`: states and the tokens drawn from them -> the states for the tokens after those."""
        ...

    def score(self, states: Tensor) -> Scores:
        """Return the scores of the states' next tokens."""
        ...

    def chains(self, roots: Sequence[Root]) -> list[Chain]:
        """Return chains of recurrent heads: the likeliest tokens, while the product of their chances is large enough."""
        ...


def unit(x: Tensor) -> Tensor:
    """Return x / rms(x) over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def begin_states(hidden: Tensor, norm: Tensor) -> Tensor:
    """Map hidden [..., H] before the model's final norm -> the heads' first states, float32."""
    return unit(hidden.float()) * norm


def apply_block(block: Block, states: Tensor, embeddings: Tensor) -> Tensor:
    """Map states [..., H] and unit embeddings [..., H] -> states [..., H]."""
    x = torch.cat((states, embeddings), dim=-1)
    return F.linear(x, block.mix) + F.linear(F.silu(F.linear(x, block.gate)) * F.linear(x, block.up), block.down)


class TorchHeads:
    """Compute in `dtype`, on the device of `embedding` [vocab, H], which is the model's own."""

    def __init__(self, heads: DraftHeads, embedding: Tensor, dtype: torch.dtype = torch.float32) -> None:
        """Raise ValueError where heads and embedding are not of one model."""
        if why := heads.why_not(embedding.shape[1], embedding.shape[0]):
            raise ValueError(why)
        self.heads, self._embedding, self._dtype = heads, embedding, dtype
        self._norm, self._head = heads.norm.to(embedding.device).float(), self._held(heads.head)
        self._blocks = [Block(*(self._held(tensor) for tensor in vars(block).values())) for block in heads.blocks]

    def _held(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._embedding.device, self._dtype)

    @torch.inference_mode()
    def begin(self, hidden: Sequence[Tensor]) -> Tensor:
        return begin_states(torch.stack(list(hidden)).to(self._norm.device), self._norm).to(self._dtype)

    @torch.inference_mode()
    def advance(self, number: int, states: Tensor, token_ids: list[int]) -> Tensor:
        embeddings = unit(self._embedding[torch.tensor(token_ids, device=self._embedding.device)].float())
        return apply_block(self._blocks[number], states, embeddings.to(self._dtype))

    @torch.inference_mode()
    def score(self, states: Tensor) -> Scores:
        logits = F.linear(states, self._head).float()
        best = logits.argmax(-1)
        chances = (logits.gather(1, best[:, None])[:, 0] - logits.logsumexp(-1)).exp()
        return Scores(logits.cpu(), best.tolist(), chances.tolist())

    def chains(self, roots: Sequence[Root]) -> list[Chain]:
        found: list[Chain] = [([], []) for _ in roots]
        kept, growing = [1.0] * len(roots), list(range(len(roots)))
        states = self.begin([root.hidden for root in roots])
        while growing:
            states = self.advance(0, states, [found[row][0][-1] if found[row][0] else roots[row].last for row in growing])
            scores, goes_on = self.score(states), []
            for at, row in enumerate(growing):
                kept[row] *= scores.chances[at]
                if kept[row] >= roots[row].least_chance:
                    found[row][0].append(int(self.heads.token_ids[scores.best[at]]))
                    found[row][1].append(scores.chances[at])
                    if len(found[row][0]) < min(roots[row].most, self.heads.depth):
                        goes_on.append(at)
            states, growing = states[goes_on], [growing[at] for at in goes_on]
        return found
