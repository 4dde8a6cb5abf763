"""What changes a row of logits before a token is drawn, in this order:
grammar, penalties, minimum length, temperature, top-k, top-p, min-p.

Each function takes and returns one row [V] float32 and sees nothing else, so a row's result cannot depend on other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.sampling_params import SamplingParams

HIDDEN = float("-inf")


def keep_allowed(row: Tensor, allowed: Bits) -> Tensor:
    """Hides the tokens whose bit is not set."""
    bits = np.unpackbits(allowed.view(np.uint8), count=row.shape[0], bitorder="little")
    return row.masked_fill(torch.from_numpy(bits).to(row.device) == 0, HIDDEN)


def penalize(row: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Repetition penalty over prompt and output (Keskar et al., CTRL, 2019; as in transformers), then presence and frequency
    penalties over the output (OpenAI's definition). Returns the row itself when all are neutral."""
    if params.repetition_penalty != 1.0:
        ids = torch.unique(torch.tensor([*prompt, *output], dtype=torch.int64, device=row.device))
        seen = row[ids]
        row = row.index_put((ids,), torch.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty))
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(list(output), device=row.device), return_counts=True)
        row = row.index_put((ids,), row[ids] - params.frequency_penalty * counts - params.presence_penalty)
    return row


def forbid(row: Tensor, token_ids: Collection[int]) -> Tensor:
    """A copy without the given tokens; ids outside the vocabulary are nobody's."""
    ids = [token for token in sorted(token_ids) if token < row.shape[0]]
    return row.index_fill(0, torch.tensor(ids, dtype=torch.int64, device=row.device), HIDDEN)


def apply_temperature(row: Tensor, temperature: float) -> Tensor:
    """The highest becomes 0 first, so that no temperature, however small, overflows to infinity minus infinity."""
    return (row - row.max()) / temperature


def keep_top_k(row: Tensor, top_k: int) -> Tensor:
    """Hides what is less likely than the k-th; equals of the k-th stay, as in transformers."""
    if not 0 < top_k < row.shape[0]:
        return row
    threshold = row.topk(top_k).values[-1]
    return row.masked_fill(row < threshold, HIDDEN)


def keep_top_p(row: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens with probability p or more (Holtzman et al., 2019); among equals the lowest ids."""
    if top_p >= 1.0:
        return row
    probabilities = row.softmax(-1)
    # All tokens below (1 - p) / V together have less than 1 - p: none of them is in the set, so they need no sorting.
    ids = (probabilities >= min((1.0 - top_p) / row.shape[0], float(probabilities.max()))).nonzero().flatten()
    ordered, order = probabilities[ids].sort(descending=True, stable=True)
    is_kept = ordered.cumsum(-1) - ordered < top_p
    is_kept[0] = True
    kept = ids[order[is_kept]]
    return torch.full_like(row, HIDDEN).index_copy_(0, kept, row[kept])


def keep_min_p(row: Tensor, min_p: float) -> Tensor:
    """Hides tokens whose probability is less than min_p times the likeliest one's (Nguyen et al., 2024)."""
    if min_p <= 0.0:
        return row
    probabilities = row.softmax(-1)
    return row.masked_fill(probabilities < min_p * probabilities.max(), HIDDEN)
