"""`decode.step`: a span for all the steps that decoded within a tenth of a second, linked to the requests that it served.

Each is a trace of its own: a step belongs to all of its requests, and a span for each token would cost more than it tells. A
request's `decode` span names its first and its last step.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from decode_service.spans import DecodeSpans
from pdmesh.engine.outputs import StepResult
from pdmesh.runtime.telemetry.steps import Step

PERIOD_S = 0.1
MAX_LINKS = 32


@dataclass
class _Batch:
    """Steps that decoded, one after another."""

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
    """Hears of every step, on the event loop; makes nothing where traces are off."""

    def __init__(self, decode: DecodeSpans) -> None:
        self._decode = decode
        self._batch: _Batch | None = None

    def on_step(self, result: StepResult) -> None:
        """Before anybody else hears of it."""
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
        """What has come since the last time, as one span."""
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
        if span.context.is_sampled:  # else nobody will ever ask for it: it would only take the place of others
            span.end(batch.ended_ns)
