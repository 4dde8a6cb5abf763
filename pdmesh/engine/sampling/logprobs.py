"""Log-probabilities of given tokens and of the likeliest ones, for many rows of logits at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdmesh.engine.outputs import TokenLogprobs

ROWS = 32
"""Rows that are computed at once: what they need besides the logits is several times as large as these."""


def logprobs_of(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of `tokens`, one for each row of logits [R, V] float32, and of the `count` likeliest tokens of
    the row, of equal ones the lowest id first. The logits are not changed."""
    starts = range(0, len(tokens), ROWS)
    parts = [_logprobs_of(logits[first : first + ROWS], tokens[first : first + ROWS], count) for first in starts]
    return [entry for part in parts for entry in part]


def _logprobs_of(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    likeliest = in_order(logprobs).topk(min(count, logits.shape[1])).indices
    ids, values = likeliest.tolist(), logprobs.gather(1, likeliest).tolist()
    top = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    return [TokenLogprobs((token, value), likely) for token, value, likely in zip(tokens, chosen, top, strict=True)]


def in_order(values: Tensor) -> Tensor:
    """Return int64 [A, V] that differ and are in the order of the values [A, V] float32: the larger value, of equal ones the
    lower id, has the larger. `topk` alone leaves the order of equals open, and a stable sort of a whole vocabulary takes far
    longer than to select a few."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    order = bits.bitwise_right_shift(31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    num_ids = values.shape[1]
    return order.long().mul_(num_ids).sub_(torch.arange(num_ids, device=values.device))
