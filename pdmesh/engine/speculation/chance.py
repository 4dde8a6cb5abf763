"""How likely the target draws the token that a draft model drew: with the same noise, from other logits.

A greedy target draws the token if it has the highest logit there, too. If its logits are the draft's but for errors of about the
size of standard Gumbel noise, the chance of that is the token's softmax probability at temperature 1. At temperature T both draw
argmax(logits + T * noise) with the same noise: the chance is then the softmax of those sums, of which the greedy case is T = 0.
(Not the probability with which the draft draws the token: behind "once upon a time there was a" a hundred tokens are as likely as
each other, and two models that agree on that draw the same one, always.) Draft heads draw with that noise, too.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.engine.sampling.counter_rng import gumbel_array
from pdmesh.engine.sampling.sampler import SampleRow

# Tokens so much (in logits; at temperatures above 1 in proportion) below the likeliest hardly ever come near the drawn one.
REACH = 12.0


def chances(logits: Tensor, token_ids: Sequence_[int], rows: Sequence_[SampleRow]) -> list[float]:
    """logits [R, V] float32, and the token drawn from each row -> R numbers in (0, 1]."""
    # In NumPy: on the CPU torch shares out operations of this size over threads that then wait for each other.
    of_rows: NDArray[np.float32] = logits.cpu().numpy()
    return [chance_of(of_rows[i], token_id, row) for i, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))]


def chance_of(logits: NDArray[np.float32], place: int, row: SampleRow, token_ids: NDArray[np.int64] | None = None) -> float:
    """Of the token whose logit stands at `place` in [V]: those of the tokens `token_ids` [V], or of all tokens in order."""
    temperature = row.params.temperature
    near = np.flatnonzero(logits > logits.max() - REACH * max(1.0, temperature))
    scores, own = logits[near].astype(np.float64), float(logits[place])
    if temperature:
        places = np.append(near, place)
        tokens = places if token_ids is None else token_ids[places]
        noise = gumbel_array(row.params.seed, row.choice, row.index, tokens)
        scores, own = scores + temperature * noise[:-1], own + temperature * float(noise[-1])
    leads = own - scores[near != place]
    # What would win against the drawn token cannot be drawn: penalties, a grammar or a filter stand against it.
    return 1.0 / (1.0 + float(np.exp(-leads[leads >= 0]).sum()))
