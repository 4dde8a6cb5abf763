"""What one engine step returns: new tokens, which requests started, and when. Times are monotonic nanoseconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.engine.speculation.stats import SpeculationStats


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities from the raw logits (before penalties and temperature) as (token id, log-probability)."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]  # the likeliest first, lowest id first among equals


class FinishReason(enum.Enum):
    STOP = "stop"  # an end-of-sequence or stop token was drawn; it is the last of the token ids
    LENGTH = "length"  # max_tokens or the context is used up


@dataclass(frozen=True)
class SequenceUpdate:
    """New tokens of one choice. `index` is the first one's place among the choice's outputs, from 0."""

    request_id: str
    choice: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one per token, or () when none were asked for
    finish_reason: FinishReason | None
    num_drafted: int = 0  # tokens that were guessed and computed beside the first of these
    num_accepted: int = 0  # of them, those that came true and are among these tokens
    draft_state: bytes = b""  # prefill_only: for whoever guesses on from here (speculation/handover.py)


@dataclass(frozen=True)
class PrefillTiming:
    """Where the time to a locally computed first token went. `opened_ns`: when the engine got the request; `queue_ns` and
    `compute_ns` together last from then, that very reading of the clock, until the end of the step that drew the token."""

    opened_ns: int
    queue_ns: int
    compute_ns: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_steps: int


@dataclass(frozen=True)
class RequestStarted:
    """A request's first token (prefilled here: `timing`) or its first decode step after a remote prefill (timing None)."""

    request_id: str
    timing: PrefillTiming | None
    decode_queue_ns: int  # remote: from start() to its first step; else 0


@dataclass(frozen=True)
class KVReady:
    """What of one request is final: all layers of its first `num_tokens` tokens, and the first `num_layers` layers of its first
    `num_step_tokens` tokens. `block_ids` are those of the whole request, in the order of its tokens."""

    request_id: str
    block_ids: tuple[int, ...]
    num_tokens: int
    num_step_tokens: int
    num_layers: int


class StepWork(NamedTuple):
    """What a step computed. A token's context is the number of tokens that it attends to, itself included.

    Prompt tokens, and those that are computed once more after a preemption, are prefill; a sequence that decodes has one token
    in the step, and those that were guessed to follow it. `prefill_context` is the sum over those tokens, `decode_context` that
    over the sequences: drafted tokens read the same keys. Several tokens that a grammar forced are computed as a prompt is, and
    count as that with what is guessed behind them.
    """

    prefill_tokens: int
    prefill_context: int
    num_decoding: int  # tokens, drafted ones included
    decode_context: int


@dataclass(frozen=True)
class EngineStats:
    """Counts of now (`taken_ns`, monotonic) and, from `num_steps` on, since start; of sequences by choice."""

    taken_ns: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_held: int
    num_free_blocks: int
    num_total_blocks: int
    num_cached_blocks: int
    num_waiting_tokens: int
    num_decoding: int  # of the running, those that get a token in every step
    decode_context: int  # tokens that those attend to in the next step, all together
    num_prefilling: int  # prompts that are being computed or wait for it
    num_steps: int
    num_generated_tokens: int
    num_prefilled_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    pace_s: float = 0.0  # of the sequence that leaves prompts least room (scheduler.py), or will; 0: nobody was promised a pace
    slack_s: float = 0.0  # of it
    speculation: SpeculationStats | None = None  # None: nobody guesses


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
    stats: EngineStats | None = None  # after the step; None when those of a step just before still tell enough


# Where a request's time in the engine went, until it started. Monotonic nanoseconds.


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
        self._is_running = True

    def took_part(self, started_ns: int, ended_ns: int, *, num_tokens: int, num_cached_tokens: int) -> None:
        """The request computed `num_tokens` tokens in this step, having found `num_cached_tokens` when it got its blocks."""
        if self._num_steps == 0:  # what is found later, after a preemption, is the request's own
            self._num_cached_tokens = num_cached_tokens
        self._queue_ns += started_ns - self._since_ns
        self._compute_ns += ended_ns - started_ns
        self._since_ns = ended_ns
        self._num_computed_tokens += num_tokens
        self._num_steps += 1

    def try_stop(self, request_id: str, *, drew_token: bool) -> RequestStarted | None:
        """Stop the clock if the request has now started, and says so once."""
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
        )
