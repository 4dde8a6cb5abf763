"""Sampling: from logits to tokens.

A draw is the Gumbel-max trick with counter-based noise (pdmesh/engine/sampling/counter_rng.py): token = argmax(logits /
temperature + noise). It has the distribution softmax(logits / temperature) and needs no state: the same (seed, choice, index)
and logits give the same token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.engine.outputs import TokenLogprobs
from pdmesh.engine.request import end_tokens
from pdmesh.engine.sampling.counter_rng import gumbel
from pdmesh.engine.sampling.grammar import Bits
from pdmesh.sampling_params import DRAWN, Kind, SamplingParams

# Functions that change a row of logits before a token is drawn, in this order:
# grammar, bias, penalties, minimum length, temperature, top-k, top-p, min-p.
#
# Each function takes and returns one row [V] float32 and sees nothing else, so a row's result cannot depend on other rows.


HIDDEN = float("-inf")
NO_TOKEN = -1
"""What samplers draw from logits with NaN or infinity: no token. The choice then ends with FinishReason.ERROR."""


def keep_allowed(row: Tensor, allowed: Bits) -> Tensor:
    """Mask the tokens whose bit is not set."""
    bits = np.unpackbits(allowed.view(np.uint8), count=row.shape[0], bitorder="little")
    return row.masked_fill(torch.from_numpy(bits).to(row.device) == 0, HIDDEN)


def add_bias(row: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """Add numbers to the logits of tokens (OpenAI's logit_bias); ids outside the vocabulary are ignored."""
    known = [(token, number) for token, number in bias if token < row.shape[0]]
    ids = torch.tensor([token for token, _ in known], dtype=torch.int64, device=row.device)
    return row.index_add(0, ids, torch.tensor([number for _, number in known], dtype=row.dtype, device=row.device))


def penalize(row: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Repetition penalty over prompt and output (Keskar et al., CTRL, 2019; as in transformers), then presence and frequency
    penalties over the output (OpenAI's definition). Returns the row itself when all are neutral."""
    if params.penalizes_prompt:
        ids = torch.unique(torch.tensor([*prompt, *output], dtype=torch.int64, device=row.device))
        seen = row[ids]
        row = row.index_put((ids,), torch.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty))
    if output and params.penalizes_output:
        ids, counts = torch.unique(torch.tensor(list(output), device=row.device), return_counts=True)
        row = row.index_put((ids,), row[ids] - params.frequency_penalty * counts - params.presence_penalty)
    return row


def forbid(row: Tensor, token_ids: Collection[int]) -> Tensor:
    """Return a copy without the given tokens; ids outside the vocabulary are ignored."""
    ids = [token for token in sorted(token_ids) if token < row.shape[0]]
    return row.index_fill(0, torch.tensor(ids, dtype=torch.int64, device=row.device), HIDDEN)


def apply_temperature(row: Tensor, temperature: float) -> Tensor:
    """Scale the row. The highest becomes 0 first, so that no temperature, however small, gives infinity minus infinity."""
    return (row - row.max()) / temperature


def keep_top_k(row: Tensor, top_k: int) -> Tensor:
    """Mask what is less likely than the k-th; equals of the k-th stay, as in transformers."""
    if not 0 < top_k < row.shape[0]:
        return row
    threshold = row.topk(top_k).values[-1]
    return row.masked_fill(row < threshold, HIDDEN)


def keep_top_p(row: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens with probability p or more (Holtzman et al., 2019); among equals the lowest
    ids."""
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
    """Mask tokens whose probability is less than min_p times the likeliest one's (Nguyen et al., 2024)."""
    if min_p <= 0.0:
        return row
    probabilities = row.softmax(-1)
    return row.masked_fill(probabilities < min_p * probabilities.max(), HIDDEN)


def keep_likely(row: Tensor, params: SamplingParams) -> Tensor:
    """Hides what none of the draws of a request may give, whatever the noise. `row`: divided by the temperature."""
    return keep_min_p(keep_top_p(keep_top_k(row, params.top_k), params.top_p), params.min_p)


# What samplers in other languages are told of a request: a record of all that their rules depend on (`DRAWN`).


def record_type(number: str, count: str, *, align: bool) -> np.dtype[np.void]:
    """A record with a field for each parameter, of these numpy types; a count of 64 bits has 64."""
    types = {Kind.NUMBER: number, Kind.COUNT: count}
    wide = [(each.name, "u8" if each.rules.bits == 64 else types[each.kind]) for each in DRAWN]
    return np.dtype(wide, align=align)


def record_of(params: SamplingParams, type_: np.dtype[np.void]) -> NDArray[np.void]:
    """One record [1]. A count that its field cannot hold becomes the most that it can: all tokens, either way."""
    record = np.zeros(1, type_)
    for parameter in DRAWN:
        value, name = getattr(params, parameter.name), parameter.name
        record[name] = min(value, np.iinfo(record.dtype[name]).max) if parameter.kind is Kind.COUNT else value
    return record


@dataclass
class SampleRow:
    """Describe what one row of logits is for. A caller that keeps it from step to step sets `index` and `allowed` anew."""

    params: SamplingParams
    choice: int
    index: int  # index of the token to draw in the choice's output
    prompt: Sequence[int]
    output: Sequence[int]  # tokens before `index`
    eos_token_ids: frozenset[int]
    allowed: Bits | None = None  # tokens that the request's grammar allows; None without one
    num_guessed: int = 0  # how many of the last tokens of `output` are draft tokens, which may be rejected
    owner: object | None = None  # the sequence, while it lives: a sampler may keep its counts; None: keep none

    @property
    def forbidden(self) -> frozenset[int]:
        """Return tokens that would end the request before min_tokens."""
        return frozenset() if self.index >= self.params.min_tokens else end_tokens(self.params, self.eos_token_ids)

    @property
    def is_plain(self) -> bool:
        """Return whether the row is greedy from the raw logits: one argmax."""
        params = self.params
        is_penalized = params.penalizes_prompt or params.penalizes_output
        is_changed = is_penalized or params.logit_bias or self.forbidden or self.allowed is not None
        return params.greedy and not is_changed


class Unseen(NamedTuple):
    """Hold tokens before those to be drawn, behind each row's `output`, that are on the device alone: for row r
    `tokens[places[r]]`."""

    tokens: Tensor  # [R'] int32
    places: list[int]


@dataclass(frozen=True)
class SampledToken:
    token_id: int  # or NO_TOKEN
    logprobs: TokenLogprobs | None  # None when none were requested


class Sampler:
    """Sample without state. A row's token depends on its logits and its SampleRow only, not on the rows beside it."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Sample logits [R, V] float32, one SampleRow each -> R tokens. The logits are not changed. Greedy ties: the lowest
        id. A row with NaN or infinity, or with -infinity alone, gives NO_TOKEN."""
        greedy = torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), NO_TOKEN).tolist()  # amax passes NaN on
        tokens = [greedy[i] if row.is_plain or greedy[i] == NO_TOKEN else _draw(logits[i], row) for i, row in enumerate(rows)]
        return [SampledToken(token, _logprobs(logits[i], token, rows[i].params)) for i, token in enumerate(tokens)]


def _draw(logits: Tensor, row: SampleRow) -> int:
    """Draw from one row [V] that is not plain."""
    params = row.params
    if row.allowed is not None:
        logits = keep_allowed(logits, row.allowed)
    if params.logit_bias:
        logits = add_bias(logits, params.logit_bias)
    logits = penalize(logits, params, row.prompt, row.output)
    if row.forbidden:
        logits = forbid(logits, row.forbidden)
    highest = float(logits.max())
    if highest == float("inf"):  # a penalty made it of a finite logit
        return NO_TOKEN
    if params.greedy or highest == HIDDEN:
        return int(logits.argmax())
    logits = keep_likely(apply_temperature(logits, params.temperature), params)
    # Noise for what can be drawn only: it does not depend on which other tokens are asked for.
    candidates = (logits > float("-inf")).nonzero().flatten()
    scores = logits[candidates] + gumbel(params.seed, row.choice, row.index, candidates)
    return int(candidates[scores.argmax()])


def _logprobs(logits: Tensor, token: int, params: SamplingParams) -> TokenLogprobs | None:
    """Return log-probabilities of the raw logits [V], before penalties and temperature."""
    if params.logprobs is None or token == NO_TOKEN:
        return None
    logprobs = logits.log_softmax(-1)
    return TokenLogprobs((token, float(logprobs[token])), _likeliest(logprobs, min(params.logprobs, logits.shape[0])))


def _likeliest(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` likeliest as (id, log-probability), lowest id first among equals (topk alone leaves their order
    open)."""
    if count == 0:
        return ()
    threshold = logprobs.topk(count).values[-1]
    ids = (logprobs >= threshold).nonzero().flatten()
    pairs = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
