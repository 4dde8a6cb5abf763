"""An engine's request: a prompt, how to sample, and what was already generated elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.kv_cache.retention import Retention
from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.sampling.grammar import Grammar, Matcher
from pdmesh.sampling_params import SamplingParams


class Pooling(enum.Enum):
    """Name how an embedding is made of the hidden states of a prompt's tokens, behind the final norm."""

    MEAN = "mean"  # of all tokens
    LAST = "last"  # that of the last token


@dataclass(frozen=True)
class EngineRequest:
    """Describe a request in token ids. It restates its history, so that any engine can continue where another stopped."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    emitted: tuple[tuple[int, ...], ...] = ()  # () or one tuple per choice: tokens already given to the client
    finished: tuple[bool, ...] = ()  # () or one per choice: that choice needs no more tokens
    cache_root: bytes = b""  # root of the block hash chain: identity and tenant salt
    weights_hash: str = ""  # of the weights that compute it; empty: those that the engine has when it comes
    adapter: AdapterId | None = None  # LoRA adapter that computes it beside the model; None: the model alone
    tpot_goal_s: float = 0.0  # TPOT objective: the longest average time between its tokens; 0: none
    unpaced_from_ns: int = 0  # see the function of that name, on the clock of time.monotonic_ns()
    prefill_only: bool = False  # stop after each choice's first new token and hold the blocks until release()
    pooling: Pooling | None = None  # the prompt's embedding is wanted, beside one token
    retention: Retention | None = None  # how long its KV is worth keeping, and for whom; None: no longer than any other
    grammar: Grammar | None = None  # each choice's output is one of its sentences, or the beginning of one
    # () or one per choice: matchers of the grammar, behind `emitted`, which follows it; None for a finished choice. A caller
    # that gives them has replayed the history off the engine's thread; else the engine does, and a long one delays its step.
    matchers: tuple[Matcher | None, ...] = field(default=(), compare=False)

    @property
    def history(self) -> tuple[int, ...]:
        """Return the tokens whose KV it needs: its prompt, and the history of the choice that goes on."""
        finished = self.finished or (False,) * len(self.emitted)
        going_on = (tokens for tokens, is_over in zip(self.emitted, finished, strict=True) if not is_over)
        return (*self.prompt, *next(going_on, ()))

    @property
    def block_root(self) -> bytes:
        """Return the root of its blocks' hashes: KV that an adapter computed is found by requests with that adapter alone."""
        return self.cache_root if self.adapter is None else self.adapter.root(self.cache_root)


UNPACED_SHARE = 0.5
"""Part of the time that a prompt has until its TTFT objective, by which it is to be computed. The rest is for what is before it
then, and for the way of its first token."""


def unpaced_from_ns(received_ns: int, ttft_left_ms: int) -> int:
    """Return from when on, less what its prompt takes alone, a request waits for no TPOT objective of others, where sequences
    speculate: it had `ttft_left_ms` until its own TTFT objective at `received_ns`, on whose clock this is. 0: it has none."""
    return received_ns + int(1e6 * UNPACED_SHARE * ttft_left_ms) if ttft_left_ms else 0


# When a choice ends: one pure rule, the same wherever a token was drawn


class EndRule(NamedTuple):
    """Hold what ends the choices of a request in one engine.

    Before `min_tokens` tokens nothing stops a choice (the sampler masks end and stop tokens there) except the end of the context.
    """

    min_tokens: int
    max_tokens: int  # of output, as the request asks or as the context leaves room
    ends: frozenset[int]  # tokens that stop a choice

    @classmethod
    def of(cls, params: SamplingParams, *, prompt_length: int, eos_token_ids: Collection[int], max_context: int) -> EndRule:
        """Return the rule. `max_context` counts prompt and output."""
        most = min(params.max_tokens, max_context - prompt_length)
        return cls(params.min_tokens, most, end_tokens(params, frozenset(eos_token_ids)))

    def reason(self, output: Sequence[int]) -> FinishReason | None:
        """Return why a choice with this output ends with its last token; None if it continues."""
        if not output:
            return None
        num_tokens = len(output)
        if output[-1] in self.ends and num_tokens > self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_tokens else None


def finish_reason(
    params: SamplingParams, *, prompt_length: int, output: Sequence[int], eos_token_ids: Collection[int], max_context: int
) -> FinishReason | None:
    """Return `EndRule.reason` of one output."""
    rule = EndRule.of(params, prompt_length=prompt_length, eos_token_ids=eos_token_ids, max_context=max_context)
    return rule.reason(output)


def stops(params: SamplingParams, token_id: int, eos_token_ids: Collection[int]) -> bool:
    """Return whether a choice ends with this token. (Before `min_tokens` no such token is drawn.)"""
    return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids)


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return all tokens that stop a choice."""
    ends = frozenset(params.stop_token_ids)
    return ends if params.ignore_eos else ends | eos_token_ids
