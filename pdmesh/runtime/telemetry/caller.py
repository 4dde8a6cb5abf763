"""The client library within its caller's trace, where the caller has OpenTelemetry: nothing is installed or imported for it.

A caller that traces has imported OpenTelemetry's API, so that is asked, and only that. Then a request is a span of the caller's,
of kind CLIENT, below the one that is current where the request is made; and the router goes on below it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from pdmesh.runtime.telemetry.propagation import Metadata, SpanContext, inject

API = "opentelemetry.trace"


class CallerSpan(Protocol):
    """One request in the caller's trace, from its making to its end."""

    @property
    def metadata(self) -> Metadata:
        """What a call of the request carries."""

    def set(self, attributes: Mapping[str, str | int | float]) -> None:
        """What has become of the request."""

    def end(self, error_type: str = "", problem: str = "") -> None:
        """The request is over; `error_type` says that it failed. Only the first call counts."""


class _NoSpan:
    """Nobody traces."""

    metadata: Metadata = ()

    def set(self, attributes: Mapping[str, str | int | float]) -> None:
        """Nothing."""

    def end(self, error_type: str = "", problem: str = "") -> None:
        """Nothing."""


NO_SPAN = _NoSpan()


def begin_request(operation: str, model: str) -> CallerSpan:
    """`operation` as the GenAI conventions name it. NO_SPAN unless the caller traces, now."""
    api: Any = sys.modules.get(API)
    return NO_SPAN if api is None else _begin(api, operation, model)


def _begin(api: Any, operation: str, model: str) -> CallerSpan:
    attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "pdmesh"}
    if model:
        attributes["gen_ai.request.model"] = model
    name = f"generate {model}".rstrip()
    span = api.get_tracer("pdmesh").start_span(name, kind=api.SpanKind.CLIENT, attributes=attributes)
    return _LiveSpan(api, span) if span.get_span_context().is_valid else NO_SPAN


class _LiveSpan:
    """Of the caller's own SDK; or, where it has none, the context that it was given by somebody else."""

    def __init__(self, api: Any, span: Any) -> None:
        self._api = api
        self._span = span
        context = span.get_span_context()
        state = context.trace_state.to_header()
        self.metadata = inject(SpanContext(context.trace_id, context.span_id, context.trace_flags.sampled, state))

    def set(self, attributes: Mapping[str, str | int | float]) -> None:
        self._span.set_attributes(attributes)

    def end(self, error_type: str = "", problem: str = "") -> None:
        if not self._span.is_recording():
            return
        if error_type:
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(self._api.StatusCode.ERROR, problem)
        self._span.end()
