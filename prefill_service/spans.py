"""What one Prefill call did, as spans below the router's call.

    prefill ─┬─ prefill.queue      from its receipt to its first step
             ├─ prefill.compute    to the first token; an event for each step
             ├─ kv.push            for each part of the KV, a group of layers: from its first byte until decode has verified it
             └─ kv.exposed         from the first token to the commit

Queue and compute last as long as the timings say. A prompt that was preempted waits between its steps, too: then the queue is
longer than it looks from the events. `Spans` itself does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.sender.push import PartMoved
from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.runtime.telemetry.spans import Kind, StepLog, Value, chunk_events, is_departure, problem_of
from pdmesh.runtime.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from prefill_service.first_tokens import FirstTokens

MAX_PUSH_SPANS = 64
"""Of one push; the last one stands for all that follow."""


class Spans:
    """Nobody is told."""

    is_on = False
    trace_name = ""

    def chunk(self, step: int, num_tokens: int) -> None:
        """Of the prompt, so many tokens are computed at the end of this step."""

    def computed(self, first: FirstTokens, queue_ns: int) -> None:
        """The first tokens are drawn, `queue_ns` and the time of computing after the receipt."""

    def part_moved(self, part: PartMoved) -> None:
        """Decode has a part of the KV."""

    def committed(self, drawn_ns: int, at_ns: int) -> None:
        """Decode goes on by itself."""

    def end(self, error: BaseException | None, problem: str | None = None) -> None:
        """The call is over; `problem`: why the hand-off failed, if it did."""


NO_SPANS = Spans()


def open_spans(tracing: Tracing, steps: StepLog, call: SpanContext | None, received_ns: int, attempt: int) -> Spans:
    """Below the router's `call`; without one, nobody follows this request."""
    return NO_SPANS if call is None else LiveSpans(tracing, steps, call, received_ns, attempt)


class LiveSpans(Spans):
    """Below one call."""

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
            self._chunks[step] = num_tokens  # less what was cached: known when it has been computed
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
