"""The outputs of an engine step: new tokens, which requests started, and when. Times are monotonic nanoseconds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.engine.speculation.stats import SpeculationStats


@dataclass(frozen=True)
class TokenLogprobs:
    """Hold natural-log probabilities from the raw logits (before penalties and temperature) as (token id, log-probability)."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]  # the likeliest first, lowest id first among equals


class FinishReason(enum.Enum):
    STOP = "stop"  # an end-of-sequence or stop token was drawn; it is the last of the token ids
    LENGTH = "length"  # max_tokens or the context is reached
    ERROR = "error"  # the logits are not finite, so no token could be drawn; it has no token of its own
    PREEMPTED = "preempted"  # prefill_only: other sequences took its blocks before it was released; it has no token of its own


@dataclass(slots=True)  # not frozen: one is made for each token, in a third of the time
class SequenceUpdate:
    """Hold new tokens of one choice. `index` is the index of the first among the choice's outputs, from 0."""

    request_id: str
    choice: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one per token, or () when none were asked for
    finish_reason: FinishReason | None
    num_drafted: int = 0  # draft tokens that were verified with the first of these
    num_accepted: int = 0  # how many of them were accepted and are among these tokens
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens but the first, with the first tokens of one choice
    draft_state: bytes = b""  # prefill_only: for the draft proposer of the decode worker (speculation/handover.py)
    pooled: tuple[float, ...] = ()  # [hidden_size] of a request with pooling


@dataclass(frozen=True)
class PrefillTiming:
    """Break down the time to a locally computed first token. `opened_ns`: when the engine got the request; `queue_ns` and
    `compute_ns` add up to the time from then, by the same clock reading, until the end of the step that drew the token."""

    opened_ns: int
    queue_ns: int
    compute_ns: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_steps: int
    num_rounded_tokens: int = 0  # of the cached ones: their KV was rounded by a tier
    is_exact: bool = True  # the KV neither is rounded nor was computed from such


@dataclass(frozen=True)
class RequestStarted:
    """Report a request's first token (prefilled here: `timing`) or its first decode step after a remote prefill (timing None)."""

    request_id: str
    timing: PrefillTiming | None
    decode_queue_ns: int  # remote: from start() to its first step; else 0


@dataclass(frozen=True)
class KVReady:
    """Report what is final of one request: all layers of its first `num_tokens` tokens, and the first `num_layers` layers of its
    first `num_step_tokens` tokens. `block_ids` are in the order of its tokens: those of the whole request, or of what is computed
    so far, and then the same list grows on the engine's thread."""

    request_id: str
    block_ids: Sequence[int]
    num_tokens: int
    num_step_tokens: int
    num_layers: int


class StepWork(NamedTuple):
    """Count what a step computed. A token's context is the number of tokens that it attends to, itself included.

    Prompt tokens, and those that are computed again after a preemption, are prefill; a sequence that decodes has one token
    in the step, and its draft tokens. `prefill_context` is the sum over the prefill tokens, `decode_context` that
    over the sequences: draft tokens read the same keys. Several tokens that a grammar forced are computed like a prompt, and
    count as prefill with the draft tokens behind them.
    """

    prefill_tokens: int
    prefill_context: int
    num_decoding: int  # tokens, draft tokens included
    decode_context: int


class CoreSeconds(NamedTuple):
    """Hold for how long, added up over cores, others have held a worker's cores and the worker others'."""

    lent: float
    borrowed: float


@dataclass(frozen=True)
class EngineStats:
    """Hold counts of now (`taken_ns`, monotonic) and, from `num_steps` on, since start; sequences count by choice."""

    taken_ns: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_held: int
    num_free_blocks: int
    num_total_blocks: int
    num_cached_blocks: int
    num_waiting_tokens: int
    num_decoding: int  # the running ones that get a token in every step
    decode_context: int  # the sum of tokens that those attend to in the next step
    num_prefilling: int  # prompts that are computed or wait for it
    num_steps: int
    num_generated_tokens: int
    num_prefilled_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    pace_s: float = 0.0  # TPOT objective of the sequence that leaves prompts least room (tpot_limiter.py); 0: none has one
    slack_s: float = 0.0  # slack of that sequence
    num_oldest_tokens: int = 0  # not yet computed of the prompt that arrived first
    num_retained_blocks: int = 0  # cached blocks that are evicted last
    num_retained_evicted: int = 0  # those that were evicted before their time, since start
    speculation: SpeculationStats | None = None  # None: there is no draft proposer


@dataclass(frozen=True)
class StepResult:
    step: int
    started_ns: int
    ended_ns: int
    num_tokens: int
    work: StepWork
    updates: tuple[SequenceUpdate, ...]
    started: tuple[RequestStarted, ...]
    ready: tuple[KVReady, ...] = ()  # of the prefill_only requests in the step
    stats: EngineStats | None = None  # after the step; None when those of a recent step suffice


# The time of a request in the engine until it started, in monotonic nanoseconds


class StartClock:
    """Add up waiting and computing until a request's first token (local) or first step (remote).

    Both parts are measured: a step that the request takes part in is compute, the time between such steps is queue. Together
    they are the whole time from opening the clock to the end of the step that started the request.
    """

    def __init__(self, now_ns: int, *, remote: bool) -> None:
        self._opened_ns = self._since_ns = now_ns
        self._remote = remote
        self._queue_ns = 0
        self._compute_ns = 0
        self._num_cached_tokens = 0
        self._num_computed_tokens = 0
        self._num_steps = 0
        self._num_rounded_tokens = 0
        self._is_exact = True
        self._is_running = True

    def found(self, *, num_rounded_tokens: int, is_exact: bool) -> None:
        """Record, before a step that the request takes part in, how much of its cached prefix is rounded."""
        if self._num_steps == 0:
            self._num_rounded_tokens = num_rounded_tokens
        self._is_exact = self._is_exact and is_exact

    def adopted(self, end: int, *, num_tokens: int, num_rounded_tokens: int) -> None:
        """Record that cached tokens up to `end`, the last `num_tokens` before it, took the place of some that the request would
        have computed. What it takes before its first step, `found` and `took_part` count."""
        if self._num_steps == 0:
            return
        # After a preemption it may find what it has computed or found before, which does not count twice.
        num_new = min(num_tokens, end - self._num_cached_tokens - self._num_computed_tokens)
        if num_new > 0:
            self._num_cached_tokens += num_new
            self._num_rounded_tokens += min(num_rounded_tokens, num_new)

    def took_part(self, started_ns: int, ended_ns: int, *, num_tokens: int, num_cached_tokens: int) -> None:
        """Record that the request computed `num_tokens` tokens in this step, with `num_cached_tokens` cached when it got its
        blocks."""
        if self._num_steps == 0:  # after a preemption the cached tokens are the request's own
            self._num_cached_tokens = num_cached_tokens
        started_ns = max(started_ns, self._since_ns)  # a request may come while its first step is already being planned
        self._queue_ns += started_ns - self._since_ns
        self._compute_ns += ended_ns - started_ns
        self._since_ns = ended_ns
        self._num_computed_tokens += num_tokens
        self._num_steps += 1

    @property
    def is_running(self) -> bool:
        """Return whether the request has not started yet."""
        return self._is_running

    def try_stop(self, request_id: str, *, drew_token: bool) -> RequestStarted | None:
        """Stop the clock if the request has now started, and report that once."""
        if not self._is_running or not (drew_token or self._remote):
            return None
        self._is_running = False
        if self._remote:
            return RequestStarted(request_id, timing=None, decode_queue_ns=self._queue_ns)
        return RequestStarted(request_id, self._prefill_timing(), decode_queue_ns=0)

    def _prefill_timing(self) -> PrefillTiming:
        return PrefillTiming(
            opened_ns=self._opened_ns,
            queue_ns=self._queue_ns,
            compute_ns=self._compute_ns,
            num_cached_tokens=self._num_cached_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_steps=self._num_steps,
            num_rounded_tokens=self._num_rounded_tokens,
            is_exact=self._is_exact,
        )
