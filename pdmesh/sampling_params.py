"""How a request wants its tokens drawn, and when it wants to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling. Neutral values (the defaults) change nothing; temperature 0 is greedy.

    `seed` is an unsigned 64-bit number; with the choice and the index of a token it fixes the token's noise.
    `logprobs` None: none wanted; k: the chosen token's and the k likeliest ones'.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    n: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self) -> None:
        """Raises ValueError naming the field, what is wrong with it and what is allowed."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: {getattr(self, name)} is not a finite number")
        _require(self.temperature >= 0, "temperature", self.temperature, "at least 0 (0 is greedy)")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 is all tokens)")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "more than 0")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, "an unsigned 64-bit number")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"in [0, max_tokens={self.max_tokens}]")
        _require(min(self.stop_token_ids, default=0) >= 0, "stop_token_ids", self.stop_token_ids, "token ids, at least 0")
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "at least 0")
        _require(self.n >= 1, "n", self.n, "at least 1")


def _require(allowed: bool, name: str, value: object, expected: str) -> None:
    if not allowed:
        raise ValueError(f"{name}: {value} is not allowed; it must be {expected}")
