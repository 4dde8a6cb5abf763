"""The steps that a modelled worker has under way: one, or many of which each only takes a little longer than the last. Pure."""

import math
import random
from dataclasses import dataclass, field

from pdmesh.planning.latency_model import LatencyModel, prefill_context
from pdmesh.simulator.workers.sequence import Sequence

SHORT = 1e-3
"""Below that, the formula loses its digits, and its value is 1."""


@dataclass(slots=True)
class Course:
    """Since `began_s`: one step with `pieces` of prompts (sequence, tokens), or `num_steps` of rows alone. The first takes
    `first_s`, each next one `more_s` more."""

    began_s: float
    num_steps: int
    first_s: float
    more_s: float = 0.0
    pieces: list[tuple[Sequence, int]] = field(default_factory=list)

    def lasts_s(self, num_steps: int) -> float:
        """The first so many of them."""
        return num_steps * self.first_s + self.more_s * (num_steps * (num_steps - 1) // 2)

    def steps_by(self, now: float) -> int:
        """How many have ended by `now`: the root of a quadratic equation, put right where rounding moved it."""
        gone_s, half = max(0.0, now - self.began_s), self.first_s - self.more_s / 2
        guess = 2 * gone_s / (half + math.sqrt(half * half + 2 * self.more_s * gone_s))
        num_steps = min(self.num_steps, int(guess))
        while num_steps < self.num_steps and self.lasts_s(num_steps + 1) <= gone_s:
            num_steps += 1
        while num_steps and self.lasts_s(num_steps) > gone_s:
            num_steps -= 1
        return num_steps


class StepTimes:
    """What steps take beyond their work: `between_s` until the next one begins, and what else the machine does, which makes steps
    longer or shorter and lasts for a while.

    Factors are log-normal around a mean of 1; `noise` is the standard deviation of one step's logarithm. Disturbances of
    `lasts_s` (the time constant of an Ornstein-Uhlenbeck process) outlast a step and not a thousand, so what many steps take
    together varies less: 2/x · (1 - (1 - e^-x)/x) of the variance is left, x = time / lasts_s.
    """

    def __init__(self, between_s: float, noise: float, lasts_s: float, seed: str) -> None:
        self._between_s, self._noise, self._lasts_s = between_s, noise, lasts_s
        self._rng = random.Random(seed)

    def apply(self, course: Course) -> None:
        """To all of its steps alike."""
        if self._noise:
            factor = self._factor(course.lasts_s(course.num_steps) / self._lasts_s)
            course.first_s *= factor
            course.more_s *= factor
        course.first_s += self._between_s

    def _factor(self, x: float) -> float:
        left = 2 / x * (1 - (1 - math.exp(-x)) / x) if x > SHORT else 1.0
        spread = self._noise * math.sqrt(left)
        return math.exp(self._rng.gauss(-spread * spread / 2, spread))


def prompts_s(speed: LatencyModel, pieces: list[tuple[Sequence, int]]) -> float:
    """What chunks of prompts add to a step, before they are counted as computed."""
    num_tokens = sum([piece[1] for piece in pieces])
    context = sum([prefill_context(s.num_computed, s.num_computed + num) for s, num in pieces])
    return speed.per_prefill_token_s * num_tokens + speed.per_prefill_context_s * context
