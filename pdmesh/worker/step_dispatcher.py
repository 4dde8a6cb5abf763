"""The dispatcher of the engine's results, once per step, to the requests that wait for them; and the spans of steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from decode_service.request import DecodeSpans
from pdmesh.engine.interface import Sink
from pdmesh.engine.outputs import KVReady, StepResult
from pdmesh.runtime.telemetry.spans import Step


class StepDispatcher:
    """Route results by engine request id. Results for an id that was removed are dropped, because that request was released."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sinks: dict[str, Sink] = {}
        self._readers: dict[str, Callable[[KVReady], None]] = {}

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, engine_id: str, sink: Sink, on_ready: Callable[[KVReady], None] | None = None) -> None:
        """Add a sink. `on_ready` gets the progress of a prefill_only request's KV, during a step and at its end."""
        self._sinks[engine_id] = sink
        if on_ready is not None:
            self._readers[engine_id] = on_ready

    def remove(self, engine_id: str) -> None:
        self._sinks.pop(engine_id, None)
        self._readers.pop(engine_id, None)

    def on_ready(self, ready: tuple[KVReady, ...]) -> None:
        """Dispatch progress of KV; the engine loop calls it on the event loop."""
        for each in ready:
            reader = self._readers.get(each.request_id)
            if reader is not None:
                reader(each)

    def on_step(self, result: StepResult) -> None:
        """Dispatch a step's results; the engine loop calls it on the event loop."""
        self.num_steps = result.step
        self.on_ready(result.ready)
        # The lookup precedes the updates: a request that ends with this step may remove its sink on its last update.
        started = [(self._sinks.get(started.request_id), started) for started in result.started]
        for update in result.updates:
            sink = self._sinks.get(update.request_id)
            if sink is not None:
                sink.on_update(update)
        for starter, news in started:
            if starter is not None:
                starter.on_started(news, result.ended_ns)


# `decode.step`: a span for all the steps that decoded within a tenth of a second, linked to the requests that they served.
#
# Each is a trace of its own, because a step belongs to several requests and a span for each token would cost too much. A
# request's `decode` span names its first and its last step.

PERIOD_S = 0.1
MAX_LINKS = 32


@dataclass
class _Batch:
    """Sum up consecutive decode steps."""

    first_step: int
    started_ns: int
    last_step: int = 0
    ended_ns: int = 0
    num_steps: int = 0
    num_decoded: int = 0
    most_decoded: int = 0
    prefill_tokens: int = 0
    num_new_tokens: int = 0

    def add(self, result: StepResult) -> None:
        work = result.work
        self.last_step, self.ended_ns = result.step, result.ended_ns
        self.num_steps += 1
        self.num_decoded += work.num_decoding
        self.most_decoded = max(self.most_decoded, work.num_decoding)
        self.prefill_tokens += work.prefill_tokens
        self.num_new_tokens += sum([len(update.token_ids) for update in result.updates])


class StepSpans:
    """Record spans of steps, on the event loop; do nothing where tracing is off."""

    def __init__(self, decode: DecodeSpans) -> None:
        self._decode = decode
        self._batch: _Batch | None = None

    def on_step(self, result: StepResult) -> None:
        """Record a step, before the dispatcher passes it on."""
        if not self._decode.tracing.is_on:
            return
        work = result.work
        self._decode.steps.add(Step(result.step, result.started_ns, result.ended_ns, work.prefill_tokens, work.num_decoding))
        if work.num_decoding:
            if self._batch is None:
                self._batch = _Batch(result.step, result.started_ns)
                asyncio.get_running_loop().call_later(PERIOD_S, self.flush)
            self._batch.add(result)

    def flush(self) -> None:
        """Record the steps since the last call as one span."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        attributes = {
            "pdmesh.first_step": batch.first_step,
            "pdmesh.last_step": batch.last_step,
            "pdmesh.steps": batch.num_steps,
            "pdmesh.tokens": batch.num_new_tokens,
            "pdmesh.batch.mean": batch.num_decoded / batch.num_steps,
            "pdmesh.batch.max": batch.most_decoded,
            "pdmesh.step.prefill_tokens": batch.prefill_tokens,
        }
        links = self._decode.take_served()[:MAX_LINKS]
        span = self._decode.tracing.begin("decode.step", None, start_ns=batch.started_ns, attributes=attributes)
        span.links = links
        if span.context.is_sampled:  # an unsampled span is never exported and would only displace other spans
            span.end(batch.ended_ns)
