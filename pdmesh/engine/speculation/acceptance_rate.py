"""How likely a guess is kept, learned from what became of guesses like it."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR_WEIGHT = 8.0  # guesses that a prior counts for
MEMORY = 400.0  # about so many of the last guesses decide: what is asked of an engine changes
_EVEN = 2.0  # guesses kept and guesses missed that a sequence's own way begins with, as promised
_FADING = 0.96  # about the last 25 guesses of a sequence decide
_TRUST_FADING = 0.992  # about the last 125 verified guesses of a proposer decide
NEARLY = 0.93
FORGIVEN = 0.002  # guesses in a step


class Calibration:
    """Guesses fall into buckets; a bucket's chance is the share of its guesses that were kept, old ones slowly forgotten."""

    __slots__ = ("_weights", "chances")

    def __init__(self, priors: Sequence[float]) -> None:
        """One bucket for each prior: the chance that is believed until guesses say otherwise."""
        self.chances = [float(prior) for prior in priors]  # of each bucket; read directly where time counts
        self._weights = [PRIOR_WEIGHT] * len(self.chances)

    @classmethod
    def of_probabilities(cls, num_buckets: int) -> Calibration:
        """For a model that says how probable its guess is (see `bucket_of`), and is believed at first."""
        return cls([(bucket + 0.5) / num_buckets for bucket in range(num_buckets)])

    def bucket_of(self, probability: float) -> int:
        """Buckets of equal width from 0 to 1."""
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
    """How one sequence differs from what is usual: its guesses are kept more often or less, as a factor on their odds.

    What was kept and missed lately is compared with what the calibration had promised, each counted from _EVEN:

        factor = kept / promised to be kept  ÷  missed / promised to be missed
    """

    __slots__ = ("_kept", "_promised", "_tried", "factor")

    def __init__(self) -> None:
        self._kept = self._promised = self._tried = 0.0
        self.factor = 1.0

    def saw(self, chance: float, kept: bool) -> None:
        """`chance`: what the calibration says."""
        self._kept = hits = self._kept * _FADING + kept
        self._promised = promised = self._promised * _FADING + chance
        self._tried = tried = self._tried * _FADING + 1.0
        self.factor = (hits + _EVEN) * (tried - promised + _EVEN) / ((promised + _EVEN) * (tried - hits + _EVEN))

    def chance(self, chance: float) -> float:
        """The calibration's chance with this sequence's odds."""
        odds = chance * self.factor
        return odds / (1.0 - chance + odds)


class Trust:
    """How far a proposer's chances can be believed: what was kept of its verified guesses, by what it had promised of them.

    Guesses that are not verified teach nothing, so one that is not believed is forgiven little by little: of wrong guesses that
    cost the part c of a step, about FORGIVEN / c are verified in a step, whatever they promise, and cost FORGIVEN of it.
    """

    __slots__ = ("_kept", "_promised")

    def __init__(self) -> None:
        self._kept = self._promised = PRIOR_WEIGHT

    @property
    def factor(self) -> float:
        """On its chances, at most 1. One that is nearly right is right: the rest is chance."""
        return min(1.0, self._kept / (NEARLY * self._promised))

    def saw(self, claimed: float, kept: bool) -> None:
        """`claimed`: by itself."""
        self._kept = _TRUST_FADING * self._kept + kept
        self._promised = _TRUST_FADING * self._promised + claimed

    def forgive(self) -> None:
        if self._kept < self._promised:
            self._kept += FORGIVEN
            self._promised += FORGIVEN
