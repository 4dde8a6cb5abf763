"""How likely the target draws the token that a draft model drew: with the same noise, from other logits.

A greedy target draws the token if it has the highest logit there, too. If its logits are the draft's but for errors of about the
size of standard Gumbel noise, the chance of that is the token's softmax probability at temperature 1. At temperature T both draw
argmax(logits + T * noise) with the same noise: the chance is then the softmax of those sums, of which the greedy case is T = 0.
(Not the probability with which the draft draws the token: behind "once upon a time there was a" a hundred tokens are as likely as
each other, and two models that agree on that draw the same one, always.)
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

import torch
from torch import Tensor

from engine.noise import gumbel
from engine.sampling import SampleRow

# Tokens so much (in logits; at temperatures above 1 in proportion) below the likeliest hardly ever come near the drawn one.
REACH = 10.0


def chances(logits: Tensor, token_ids: Sequence_[int], rows: Sequence_[SampleRow]) -> list[float]:
    """logits [R, V] float32, and the token drawn from each row -> R numbers in (0, 1]."""
    return [_chance(logits[i], token_id, row) for i, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))]


def _chance(logits: Tensor, token_id: int, row: SampleRow) -> float:
    if row.is_plain:
        return 1.0 / float((logits - logits[token_id]).exp_().sum())
    temperature = row.params.temperature
    ids = (logits > logits.max() - REACH * max(1.0, temperature)).nonzero().flatten()
    ids = torch.cat((ids.new_tensor([token_id]), ids[ids != token_id]))
    scores = logits[ids]
    if temperature:
        scores += temperature * gumbel(row.params.seed, row.choice, row.index, ids)
    leads = scores[0] - scores
    # What would win against the drawn token cannot be drawn: penalties, a grammar or a filter stand against it.
    return 1.0 / float((-leads[leads >= 0]).exp_().sum())
