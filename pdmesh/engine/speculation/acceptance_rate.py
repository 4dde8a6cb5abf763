"""Acceptance rates: the chance that a draft token is accepted, learned from earlier ones like it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.engine.sampling.counter_rng import gumbel_array
from pdmesh.engine.sampling.sampler import SampleRow

PRIOR_WEIGHT = 8.0  # draft tokens that a prior counts for
MEMORY = 400.0  # about as many of the last draft tokens decide, because an engine's requests change
_EVEN = 2.0  # accepted and rejected tokens, as predicted, with which a sequence's own odds begin
_FADING = 0.96  # about the last 25 draft tokens of a sequence decide
_TRUST_FADING = 0.992  # about the last 125 verified tokens of a proposer decide
NEARLY = 0.97
FORGIVEN = 0.002  # see CalibratedRate


class Calibration:
    """Sort draft tokens into buckets; a bucket's chance is its share of accepted tokens, old ones slowly forgotten."""

    __slots__ = ("_weights", "chances")

    def __init__(self, priors: Sequence[float]) -> None:
        """Make one bucket for each prior: its chance until results are seen."""
        self.chances = [float(prior) for prior in priors]  # of each bucket; read directly where speed matters
        self._weights = [PRIOR_WEIGHT] * len(self.chances)

    @classmethod
    def of_probabilities(cls, num_buckets: int) -> Calibration:
        """Return a calibration for a model that gives probabilities (see `bucket_of`), which are used at first."""
        return cls([(bucket + 0.5) / num_buckets for bucket in range(num_buckets)])

    def bucket_of(self, probability: float) -> int:
        """Return the bucket of a probability, of equal width from 0 to 1."""
        num_buckets = len(self.chances)
        return min(int(probability * num_buckets), num_buckets - 1)

    def chance(self, bucket: int) -> float:
        return self.chances[bucket]

    def saw(self, bucket: int, kept: bool) -> None:
        weights = self._weights
        weight = weights[bucket]
        if weight < MEMORY:
            weight = weights[bucket] = weight + 1.0
        chances = self.chances
        chances[bucket] += (kept - chances[bucket]) / weight


class Bent:
    """Track how one sequence differs from the average: its tokens are accepted more or less often, as a factor on their odds.

    Its accepted and rejected tokens are compared with what the calibration had predicted, each counted from _EVEN:

    factor = accepted / predicted to be accepted  ÷  rejected / predicted to be rejected
    """

    __slots__ = ("_kept", "_promised", "_tried", "factor")

    def __init__(self) -> None:
        self._kept = self._promised = self._tried = 0.0
        self.factor = 1.0

    def saw(self, chance: float, kept: bool) -> None:
        """Record a result; `chance` is the calibration's."""
        self._kept = hits = self._kept * _FADING + kept
        self._promised = promised = self._promised * _FADING + chance
        self._tried = tried = self._tried * _FADING + 1.0
        self.factor = (hits + _EVEN) * (tried - promised + _EVEN) / ((promised + _EVEN) * (tried - hits + _EVEN))

    def chance(self, chance: float) -> float:
        """Return the calibration's chance with this sequence's odds."""
        odds = chance * self.factor
        return odds / (1.0 - chance + odds)


class CalibratedRate:
    """Scale a proposer's chances by its record: the accepted ones of its verified tokens, over its own prediction of them.

    Tokens that are not verified teach nothing, so the factor recovers little by little: if a wrong token costs the share c of a
    step, about FORGIVEN / c wrong tokens are verified in a step, whatever their chances, and cost the share FORGIVEN of it.
    """

    __slots__ = ("_kept", "_promised")

    def __init__(self) -> None:
        self._kept = self._promised = PRIOR_WEIGHT

    @property
    def factor(self) -> float:
        """Return the factor on the proposer's chances, at most 1. A small deviation is noise and counts as none."""
        return min(1.0, self._kept / (NEARLY * self._promised))

    def saw(self, claimed: float, kept: bool) -> None:
        """Record a result; `claimed` is the proposer's own chance."""
        self._kept = _TRUST_FADING * self._kept + kept
        self._promised = _TRUST_FADING * self._promised + claimed

    def forgive(self, num_steps: int) -> None:
        """Let the factor recover by what so many steps forgive."""
        if self._kept < self._promised:
            self._kept += num_steps * FORGIVEN
            self._promised += num_steps * FORGIVEN


# The chance that the target draws the token that a draft model drew: with the same noise, from other logits
#
# A greedy target draws the token if it has the highest logit there, too. If its logits are the draft's but for errors of about
# the size of standard Gumbel noise, the chance of that is the token's softmax probability at temperature 1. At temperature T both
# draw argmax(logits + T * noise) with the same noise: the chance is then the softmax of those sums, of which the greedy case is
# T = 0. (Not the probability with which the draft draws the token: after "once upon a time there was a" a hundred tokens are as
# likely as each other, and two models that agree on that draw the same one, always.) Draft heads draw with that noise, too.


# Tokens this far below the likeliest one (in logits; at temperatures above 1 in proportion) hardly ever come near the drawn one.
REACH = 12.0


def chances(logits: Tensor, token_ids: Sequence[int], rows: Sequence[SampleRow]) -> list[float]:
    """Return R chances in (0, 1] for logits [R, V] float32 and the token drawn from each row."""
    # In NumPy: on the CPU torch splits operations of this size over threads that then wait for each other.
    of_rows: NDArray[np.float32] = logits.cpu().numpy()
    return [chance_of(of_rows[i], token_id, row) for i, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))]


def chance_of(logits: NDArray[np.float32], place: int, row: SampleRow, token_ids: NDArray[np.int64] | None = None) -> float:
    """Return the chance of the token at `place` in [V]: logits of the tokens `token_ids` [V], or of all tokens in order."""
    temperature = row.params.temperature
    near = np.flatnonzero(logits > logits.max() - REACH * max(1.0, temperature))
    scores, own = logits[near].astype(np.float64), float(logits[place])
    if temperature:
        places = np.append(near, place)
        tokens = places if token_ids is None else token_ids[places]
        noise = gumbel_array(row.params.seed, row.choice, row.index, tokens)
        scores, own = scores + temperature * noise[:-1], own + temperature * float(noise[-1])
    leads = own - scores[near != place]
    # A token that would beat the drawn one cannot be drawn: penalties, a grammar or a filter exclude it.
    return 1.0 / (1.0 + float(np.exp(-leads[leads >= 0]).sum()))
