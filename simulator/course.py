"""The steps that a modelled worker has under way: one, or many of which each only takes a little longer than the last. Pure."""

import math
from dataclasses import dataclass, field

from planning.latency_model import LatencyModel, prefill_context
from simulator.sequence import Sequence


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


def prompts_s(speed: LatencyModel, pieces: list[tuple[Sequence, int]]) -> float:
    """What chunks of prompts add to a step, before they are counted as computed."""
    num_tokens = sum([piece[1] for piece in pieces])
    context = sum([prefill_context(s.num_computed, s.num_computed + num) for s, num in pieces])
    return speed.per_prefill_token_s * num_tokens + speed.per_prefill_context_s * context
