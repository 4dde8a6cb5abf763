"""How long an engine step takes, from what it computes; and from that, how long a prompt and a token take. Pure.

A step's time is linear in its work (`docs/latency_model.md` says how well that fits):

    fixed + prefill token · tokens + prefill context · Σ contexts of those tokens        the chunk of prompts in the step
          + sequence · sequences + context token · Σ contexts of those sequences         the decode rows in the step

The same five numbers describe a step of prompts, one of decode rows and a mixed one.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """What one step computes. A token's context is the number of tokens that it attends to, itself included.

    `prefill_context` sums the contexts of the prompt tokens in the step, `decode_context` those of the rows that decode.
    """

    prefill_tokens: int = 0
    prefill_context: int = 0
    num_decoding: int = 0
    decode_context: int = 0


def prefill_context(first: int, last: int) -> int:
    """The contexts of the prompt tokens `first` to `last` (from 0, `last` excluded), summed."""
    return (last * (last + 1) - first * (first + 1)) // 2


@dataclass(frozen=True)
class LatencyModel:
    """One worker's steps, in seconds. `num_steps` it was fitted to: 0 means a prior from hardware and model shape.

    The errors are medians of |predicted - observed| / observed over the latest steps with and without prompt tokens.
    """

    fixed_s: float
    per_prefill_token_s: float
    per_prefill_context_s: float
    per_sequence_s: float
    per_context_token_s: float
    num_steps: int = 0
    prefill_error: float = 0.0
    decode_error: float = 0.0

    def step_s(self, work: Work) -> float:
        """The time of one step."""
        return (
            self.fixed_s
            + self.per_prefill_token_s * work.prefill_tokens
            + self.per_prefill_context_s * work.prefill_context
            + self.per_sequence_s * work.num_decoding
            + self.per_context_token_s * work.decode_context
        )

    def prefill_s(self, first: int, last: int, *, chunk: int, num_decoding: int = 0, decode_context: int = 0) -> float:
        """The steps that compute a prompt's tokens `first` to `last` (excluded), at most `chunk` tokens in each, while
        `num_decoding` sequences get a token in every step."""
        num_steps = -(-(last - first) // max(1, chunk))
        alone = Work(last - first, prefill_context(first, last), num_steps * num_decoding, num_steps * decode_context)
        return self.step_s(alone) + (num_steps - 1) * self.fixed_s

    def decode_s(self, num_decoding: int, decode_context: int) -> float:
        """The time of a step in which sequences only decode: what a token takes."""
        return self.step_s(Work(num_decoding=num_decoding, decode_context=decode_context))
