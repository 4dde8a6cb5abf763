"""Embeddings: the hidden states of a prompt behind the model's final norm, their mean or the last of them.

The model computes a prompt as always, in chunks; each step adds the states of its tokens to a sum in float64. The mean needs the
states of all tokens, so that its prompts take nothing from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, float64

from pdmesh.engine.kernels.cpu.model import NativeModel, PackedNorm
from pdmesh.engine.models.layers import Norm
from pdmesh.engine.request import Pooling
from pdmesh.engine.runner.prompt_scores import rows_of
from pdmesh.engine.scheduler.scheduler import ScheduledSequence
from pdmesh.engine.scheduler.sequence import Sequence

FinalNorm = Callable[[Tensor], Tensor]


def final_norm(model: object) -> FinalNorm | None:
    """Return the norm before a model's head, [R, hidden_size] -> the same shape; None for models whose states are not read.

    Where several ranks share a model, its states are whole on each of them, and rank 0's are pooled."""
    if isinstance(model, NativeModel):
        return _unpacked(model.weights.norm, model.config.hidden_size)
    norm = getattr(model, "norm", None)
    return norm if isinstance(norm, Norm) else None


def _unpacked(norm: PackedNorm, hidden_size: int) -> Norm:
    bias = None if norm.bias is None else norm.bias[:hidden_size]
    return Norm(norm.weight[:hidden_size], norm.eps, norm.kind, bias)


class Pooler:
    """Pool the hidden states of steps."""

    def __init__(self, norm: FinalNorm, hidden_size: int) -> None:
        self._norm, self.hidden_size = norm, hidden_size

    def take(self, pieces: list[ScheduledSequence], states: Tensor) -> dict[Sequence, tuple[float, ...]]:
        """Take in a step's states [R, hidden_size], before the final norm; return the embeddings of the prompts that it ends."""
        pooled: dict[Sequence, tuple[float, ...]] = {}
        for piece, rows in rows_of(pieces):
            sequence, pooling = piece.sequence, piece.sequence.group.request.pooling
            if pooling is None or not rows:
                continue
            normed = self._norm(states[rows.start : rows.stop])
            if pooling is Pooling.MEAN:
                added = normed.sum(0, dtype=float64)
                sequence.state_sum = added if sequence.num_computed == 0 else sequence.state_sum + added
            if piece.reaches_end:
                whole = sequence.state_sum / sequence.num_tokens if pooling is Pooling.MEAN else normed[-1]
                pooled[sequence] = tuple(whole.tolist())
        return pooled
