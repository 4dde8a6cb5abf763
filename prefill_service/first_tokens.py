"""The first tokens of a prefill, in the forms for the router and for decode, and the spans of a Prefill call."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvtransfer.sender.push import PartMoved
from pdmesh.engine.outputs import FinishReason, PrefillTiming, RequestStarted, SequenceUpdate, TokenLogprobs
from pdmesh.runtime.errors import DataLoss, ResourceExhausted
from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.runtime.telemetry.spans import Kind, StepLog, Value, chunk_events, is_departure, problem_of
from pdmesh.runtime.telemetry.tracing import Tracing
from pdmesh.v1 import common_pb2, prefill_pb2, transfer_pb2

_FINISH_REASONS: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class FirstTokens:
    """Hold the first tokens, one update per choice. `drawn_ns`: the end of the engine's step (monotonic)."""

    updates: tuple[SequenceUpdate, ...]
    timing: PrefillTiming
    drawn_ns: int

    @property
    def all_finished(self) -> bool:
        """Return whether nothing is left to decode."""
        return all(update.finish_reason is not None for update in self.updates)

    def for_router(self) -> list[prefill_pb2.FirstToken]:
        return [_first_token(update) for update in self.updates]

    def for_decode(self) -> list[transfer_pb2.CommittedChoice]:
        return [
            transfer_pb2.CommittedChoice(
                choice=update.choice,
                index=update.index,
                token_id=update.token_ids[0],
                finish_reason=_FINISH_REASONS[update.finish_reason],
                draft_state=update.draft_state,
            )
            for update in self.updates
        ]

    def queue_ns(self, received_ns: int) -> int:
        """Return the time from the receipt of the request to its first step."""
        return self.timing.opened_ns - received_ns + self.timing.queue_ns

    def timings(self, received_ns: int) -> common_pb2.PrefillTimings:
        """Return the timings up to the hand-over to gRPC, which is now. One part ends and the next begins at the same clock
        reading: between two readings the thread may wait for the interpreter lock, and that time would belong to no part."""
        now_ns = time.monotonic_ns()
        return common_pb2.PrefillTimings(
            prefill_queue_ns=self.queue_ns(received_ns),
            prefill_compute_ns=self.timing.compute_ns,
            return_ns=now_ns - self.drawn_ns,
            service_ns=now_ns - received_ns,
            num_cached_tokens=self.timing.num_cached_tokens,
            num_computed_tokens=self.timing.num_computed_tokens,
            num_steps=self.timing.num_steps,
            num_rounded_tokens=self.timing.num_rounded_tokens,
        )


RETRY_DELAY_S = 0.1


class FirstTokensSink:
    """Collect the engine's results of one prefill. All first tokens are drawn in one step, which also ends the prefill."""

    def __init__(self) -> None:
        self._updates: list[SequenceUpdate] = []
        self._done: asyncio.Future[FirstTokens] = asyncio.get_running_loop().create_future()

    def on_update(self, update: SequenceUpdate) -> None:
        if update.finish_reason is FinishReason.PREEMPTED and not self._done.done():
            gone = "this worker gave the prompt's blocks to other sequences"
            self._done.set_exception(ResourceExhausted(gone, retry_delay_s=RETRY_DELAY_S))
        self._updates.append(update)

    def on_started(self, started: RequestStarted, ended_ns: int) -> None:
        assert started.timing is not None, f"{started.request_id} was prefilled here"
        if self._done.done():
            return
        if any(update.finish_reason is FinishReason.ERROR for update in self._updates):
            self._done.set_exception(DataLoss.of_logits())
        else:
            self._done.set_result(FirstTokens(tuple(self._updates), started.timing, ended_ns))

    async def wait(self, timeout_s: float) -> FirstTokens | None:
        """Return the first tokens; None if there are none after `timeout_s`."""
        await asyncio.wait((self._done,), timeout=timeout_s)
        return self._done.result() if self._done.done() else None


def _first_token(update: SequenceUpdate) -> prefill_pb2.FirstToken:
    token = prefill_pb2.FirstToken(
        choice=update.choice,
        index=update.index,
        token_id=update.token_ids[0],
        finish_reason=_FINISH_REASONS[update.finish_reason],
    )
    if update.logprobs:
        token.logprobs.CopyFrom(_wire_logprobs(update.logprobs[0]))
    token.prompt_logprobs.extend(map(_wire_logprobs, update.prompt_logprobs))
    return token


def _wire_logprobs(logprobs: TokenLogprobs) -> common_pb2.Logprobs:
    chosen, value = logprobs.chosen
    return common_pb2.Logprobs(
        chosen=common_pb2.TokenLogprob(token_id=chosen, logprob=value),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=top) for token, top in logprobs.top],
    )


# Spans of one Prefill call, below the router's call.
#
#     prefill ─┬─ prefill.queue      from the receipt to the first step
#              ├─ prefill.compute    to the first token; an event for each step
#              ├─ kv.push            for each part of the KV, a group of layers: from its first byte until decode has verified it
#              └─ kv.exposed         from the first token to the commit
#
# Queue and compute have the durations of the timings. A prompt that was preempted also waits between its steps, so its queue time
# is longer than the events show. `Spans` itself does nothing.

MAX_PUSH_SPANS = 64
"""The limit of spans for one push; the last span covers all parts that follow."""


class Spans:
    """Accept the events of a Prefill call, and record nothing."""

    is_on = False
    trace_name = ""

    def chunk(self, step: int, num_tokens: int) -> None:
        """Record that `num_tokens` of the prompt are computed at the end of this step."""

    def computed(self, first: FirstTokens, queue_ns: int) -> None:
        """Record that the first tokens are drawn, `queue_ns` plus the compute time after the receipt."""

    def part_moved(self, part: PartMoved) -> None:
        """Record that decode has verified a part of the KV."""

    def committed(self, drawn_ns: int, at_ns: int) -> None:
        """Record that decode has committed."""

    def end(self, error: BaseException | None, problem: str | None = None) -> None:
        """End the call's span. `problem`: why the hand-off failed; None: it succeeded."""


NO_SPANS = Spans()


def open_spans(tracing: Tracing, steps: StepLog, call: SpanContext | None, received_ns: int, attempt: int) -> Spans:
    """Return the spans below the router's `call`; without a call the request is not traced."""
    return NO_SPANS if call is None else LiveSpans(tracing, steps, call, received_ns, attempt)


class LiveSpans(Spans):
    """Record the spans of one call."""

    is_on = True

    def __init__(self, tracing: Tracing, steps: StepLog, call: SpanContext, received_ns: int, attempt: int) -> None:
        self.trace_name = call.trace_name
        self._tracing = tracing
        self._steps = steps
        self._received_ns = received_ns
        self._attempt = attempt
        attributes = {"pdmesh.attempt": attempt}
        self._root = tracing.begin("prefill", call, start_ns=received_ns, kind=Kind.SERVER, attributes=attributes)
        self._chunks: dict[int, int] = {}
        self._num_tokens: int | None = None
        self._parts: list[PartMoved] = []

    def chunk(self, step: int, num_tokens: int) -> None:
        if self._num_tokens is not None:
            self._chunks[step] = num_tokens - self._num_tokens
        else:
            self._chunks[step] = num_tokens  # includes cached tokens, whose number is known only after the computation
        self._num_tokens = num_tokens

    def computed(self, first: FirstTokens, queue_ns: int) -> None:
        timing, parent = first.timing, self._root.context
        self._tracing.record("prefill.queue", parent, self._received_ns, self._received_ns + queue_ns)
        if self._chunks:
            self._chunks[min(self._chunks)] -= timing.num_cached_tokens
        steps = [step for number in sorted(self._chunks) if (step := self._steps.of(number)) is not None]
        attributes = {
            "pdmesh.cached_tokens": timing.num_cached_tokens,
            "pdmesh.tokens": timing.num_computed_tokens,
            "pdmesh.steps": timing.num_steps,
        }
        started_ns, events = first.drawn_ns - timing.compute_ns, chunk_events(steps, self._chunks)
        self._tracing.record("prefill.compute", parent, started_ns, first.drawn_ns, attributes=attributes, events=events)

    def part_moved(self, part: PartMoved) -> None:
        if len(self._parts) < MAX_PUSH_SPANS:
            self._parts.append(part)
        else:
            self._parts[-1] = self._parts[-1].joined(part)

    def committed(self, drawn_ns: int, at_ns: int) -> None:
        self._tracing.record("kv.exposed", self._root.context, drawn_ns, at_ns)

    def end(self, error: BaseException | None, problem: str | None = None) -> None:
        for part in self._parts:
            self._record_push(part)
        num_bytes = sum(part.num_bytes for part in self._parts)
        if self._parts:
            self._root.set({"pdmesh.kv.bytes": num_bytes, "pdmesh.kv.transport": self._parts[0].transport})
        error_type, words = ("", "") if error is None else problem_of(error)
        if problem is not None:
            self._root.fail("handoff_failed", problem)
        elif is_departure(error_type):
            self._root.set({"error.type": error_type})
        elif error_type:
            self._root.fail(error_type, words)
        self._root.end()

    def _record_push(self, part: PartMoved) -> None:
        attributes: dict[str, Value] = {
            "pdmesh.kv.bytes": part.num_bytes,
            "pdmesh.kv.transport": part.transport,
            "pdmesh.kv.layer_start": part.layer_start,
            "pdmesh.kv.layer_end": part.layer_end,
            "pdmesh.kv.blocks": part.num_blocks,
            "pdmesh.attempt": self._attempt,
        }
        self._tracing.record("kv.push", self._root.context, part.sent_ns, part.verified_ns, attributes=attributes)
