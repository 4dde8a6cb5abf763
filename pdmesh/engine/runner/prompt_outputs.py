"""What a step gives of prompts besides tokens: the log-probabilities of a prompt's tokens, and embeddings, which are the hidden
states of a prompt behind the model's final norm, their mean or the last of them.

    prompt  t0 t1 t2 | t3 t4        two chunks; the row after t0 has the log-probability of t1, ... the row after t4 draws
    rows    t0 t1 t2 | t3 (t4)

For embeddings the model computes a prompt as always, in chunks; each step adds the states of its tokens to a sum in float64. The
mean needs the states of all tokens, so that its prompts take nothing from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, float64

from pdmesh.engine.kernels.cpu.model import NativeModel, PackedNorm
from pdmesh.engine.models.layers import Norm
from pdmesh.engine.request import Pooling
from pdmesh.engine.sampling.logprobs import logprobs_of
from pdmesh.engine.scheduler.scheduler import ScheduledSequence
from pdmesh.engine.scheduler.sequence import Sequence

FinalNorm = Callable[[Tensor], Tensor]


def rows_of(pieces: list[ScheduledSequence]) -> Iterator[tuple[ScheduledSequence, range]]:
    """Yield the rows of each scheduled sequence: those of tokens that do not draw, then those that do."""
    row = 0
    for piece in pieces:
        draws = piece.reaches_end and bool(piece.sequence.choices_to_draw)
        end = row + piece.num_prompt_rows + (1 + len(piece.draft) if draws else 0)
        yield piece, range(row, end)
        row = end


def take_scores(pieces: list[ScheduledSequence], logits: Tensor) -> None:
    """Append to sequences the log-probabilities of those tokens of their prompts that follow a row of `logits` [R, vocab]; after
    a preemption some are there already."""
    for piece, rows in rows_of(pieces):
        sequence, request = piece.sequence, piece.sequence.group.request
        count = request.sampling.prompt_logprobs
        if count is None or not piece.num_prompt_rows:
            continue
        num_known = max(0, len(sequence.prompt_logprobs) - sequence.num_computed)
        first, end = rows.start + num_known, rows.start + piece.num_prompt_rows
        if first < end:
            position = sequence.num_computed + num_known + 1
            tokens = request.prompt[position : position + end - first]
            sequence.prompt_logprobs += logprobs_of(logits[first:end], tokens, count)


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
