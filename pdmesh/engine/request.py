"""An engine's request: a prompt, how to sample, and what was already generated elsewhere."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.sampling.grammar import Grammar, Matcher

# Sampling parameters of a request, and when it stops


MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Hold one request's sampling parameters. Neutral values (the defaults) change nothing; temperature 0 is greedy.

    `seed` is an unsigned 64-bit number; with the choice and the index of a token it fixes the token's noise.
    `logprobs` None: none; k: the chosen token's and the k likeliest ones'.
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
        """Raise ValueError naming the field, what is wrong with it and what is allowed."""
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


@dataclass(frozen=True)
class EngineRequest:
    """Describe a request in token ids. It restates its history, so that any engine can continue where another stopped."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    emitted: tuple[tuple[int, ...], ...] = ()  # () or one tuple per choice: tokens already given to the client
    finished: tuple[bool, ...] = ()  # () or one per choice: that choice needs no more tokens
    cache_root: bytes = b""  # root of the block hash chain: identity and tenant salt
    tpot_goal_s: float = 0.0  # TPOT objective: the longest average time between its tokens; 0: none
    prefill_only: bool = False  # stop after each choice's first new token and hold the blocks until release()
    grammar: Grammar | None = None  # each choice's output is one of its sentences, or the beginning of one
    # () or one per choice: matchers of the grammar, behind `emitted`, which follows it; None for a finished choice. A caller
    # that gives them has replayed the history off the engine's thread; else the engine does, and a long one delays its step.
    matchers: tuple[Matcher | None, ...] = field(default=(), compare=False)


# When a choice ends: one pure rule, the same wherever a token was drawn


def finish_reason(
    params: SamplingParams, *, prompt_length: int, output: Sequence[int], eos_token_ids: Collection[int], max_context: int
) -> FinishReason | None:
    """Return why a choice with this output ends with its last token; None if it continues. `max_context` counts prompt and
    output.

    Before `min_tokens` tokens nothing stops a choice (the sampler masks end and stop tokens there) except the end of the context.
    """
    if not output:
        return None
    if len(output) > params.min_tokens and stops(params, output[-1], eos_token_ids):
        return FinishReason.STOP
    if len(output) >= params.max_tokens or prompt_length + len(output) >= max_context:
        return FinishReason.LENGTH
    return None


def stops(params: SamplingParams, token_id: int, eos_token_ids: Collection[int]) -> bool:
    """Return whether a choice ends with this token. (Before `min_tokens` no such token is drawn.)"""
    return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids)


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return all tokens that stop a choice."""
    ends = frozenset(params.stop_token_ids)
    return ends if params.ignore_eos else ends | eos_token_ids
