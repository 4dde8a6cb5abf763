"""What a Submit carries of the trace: who calls, and whose child all is that decode does after it has answered.

traceparent          the Submit call: parent of what happens until its answer
pdmesh-attempt       the attempt at placing: parent of `decode`, which may last for minutes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdmesh.runtime.telemetry import propagation
from pdmesh.runtime.telemetry.propagation import Metadata, SpanContext

ATTEMPT = "pdmesh-attempt"


@dataclass(frozen=True)
class SubmitContext:
    """The spans of the router that a Submit belongs to."""

    call: SpanContext
    attempt: SpanContext


def submit_metadata(call: SpanContext, attempt: SpanContext) -> Metadata:
    """Metadata of the Submit call."""
    return (*propagation.inject(call), (ATTEMPT, propagation.format_parent(attempt)))


def read_submit(metadata: Iterable[tuple[str, str | bytes]] | None) -> SubmitContext | None:
    """None: the router does not trace this request, or says so unreadably. Callers that know nothing of attempts have one."""
    pairs = tuple(metadata or ())
    call = propagation.extract(pairs)
    if call is None:
        return None
    named = [value for key, value in pairs if key == ATTEMPT and isinstance(value, str)]
    attempt = propagation.parse(named[0]) if len(named) == 1 else None
    return SubmitContext(call, call if attempt is None or attempt.trace_id != call.trace_id else attempt)
