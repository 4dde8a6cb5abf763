"""The context of a trace as it travels between processes: W3C Trace Context, in gRPC metadata and HTTP headers.

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01      version, trace, span, flags
    tracestate: vendor=value,other=value                                      passed on unchanged

A context that cannot be read is ignored, as the standard says: a new trace begins, and no error is returned.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512
SAMPLED = 0x01

Metadata = tuple[tuple[str, str], ...]
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(r"(?P<key>[a-z0-9][a-z0-9_\-*/@]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_MAX_MEMBERS = 32


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Identify a span of a trace. `is_sampled`: the root's process sends its spans. `state`: a tracestate, "" without one."""

    trace_id: int
    span_id: int
    is_sampled: bool = True
    state: str = ""

    @property
    def trace_name(self) -> str:
        """Return the trace's id as people and logs write it."""
        return f"{self.trace_id:032x}"


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> SpanContext | None:
    """Return the context in a call's metadata or in headers, whatever their case; None without a readable one."""
    parents, states = list[str](), list[str]()
    for key, value in metadata:
        name = key.lower()
        if name == TRACEPARENT and isinstance(value, str):
            parents.append(value)
        elif name == TRACESTATE and isinstance(value, str):
            states.append(value)
    context = parse(parents[0]) if len(parents) == 1 else None
    return context if context is None or not states else replace(context, state=_checked_state(",".join(states)))


def parse(traceparent: str) -> SpanContext | None:
    """Parse without state; None if invalid. Of a later version the known part counts."""
    match = _PARENT.fullmatch(traceparent.strip(" \t"))
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, bool(int(match[4], 16) & SAMPLED))


def inject(context: SpanContext | None) -> Metadata:
    """Return the metadata to send with a call; nothing without a context."""
    if context is None:
        return ()
    parent = (TRACEPARENT, format_parent(context))
    return (parent, (TRACESTATE, context.state)) if context.state else (parent,)


def format_parent(context: SpanContext) -> str:
    """Return a traceparent."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{'01' if context.is_sampled else '00'}"


def _checked_state(text: str) -> str:
    """Return the state as received, without empty members; "" if anything in it breaks the rules, or it is longer than must be
    passed on."""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {match["key"] for match in found if match is not None}
    if len(members) > _MAX_MEMBERS or len(keys) != len(members):
        return ""
    state = ",".join(members)
    return state if len(state) <= MAX_STATE_CHARS else ""


# The trace context of a Submit: its caller, and the parent of all that the decode worker does after it has answered.
#
# traceparent          the Submit call: parent of what happens until its answer
# pdmesh-attempt       the attempt at placing: parent of `decode`, which may last for minutes


ATTEMPT = "pdmesh-attempt"


@dataclass(frozen=True)
class SubmitContext:
    """Name the router's spans that a Submit belongs to."""

    call: SpanContext
    attempt: SpanContext


def submit_metadata(call: SpanContext, attempt: SpanContext) -> Metadata:
    """Return the metadata of the Submit call."""
    return (*inject(call), (ATTEMPT, format_parent(attempt)))


def read_submit(metadata: Iterable[tuple[str, str | bytes]] | None) -> SubmitContext | None:
    """Return the context; None if the router does not trace this request, or it is unreadable. Without an attempt the call is
    used for both."""
    pairs = tuple(metadata or ())
    call = extract(pairs)
    if call is None:
        return None
    named = [value for key, value in pairs if key == ATTEMPT and isinstance(value, str)]
    attempt = parse(named[0]) if len(named) == 1 else None
    return SubmitContext(call, call if attempt is None or attempt.trace_id != call.trace_id else attempt)


# The client library within its caller's trace, if the caller uses OpenTelemetry: nothing is installed or imported for it.
#
# A caller that traces has imported OpenTelemetry's API, so only that is used. A request is then a span of the caller's, of kind
# CLIENT, below the one that is current where the request is made; and the router continues below it.


API = "opentelemetry.trace"


class CallerSpan(Protocol):
    """Represent one request in the caller's trace, from start to end."""

    @property
    def metadata(self) -> Metadata:
        """Return the metadata that a call of the request carries."""

    def set(self, attributes: Mapping[str, str | int | float]) -> None:
        """Set attributes with the outcome of the request."""

    def end(self, error_type: str = "", problem: str = "") -> None:
        """End the request; `error_type` says that it failed. Only the first call counts."""


class _NoSpan:
    """Stand in where the caller does not trace."""

    metadata: Metadata = ()

    def set(self, attributes: Mapping[str, str | int | float]) -> None:
        """Do nothing."""

    def end(self, error_type: str = "", problem: str = "") -> None:
        """Do nothing."""


NO_SPAN = _NoSpan()


def begin_request(operation: str, model: str) -> CallerSpan:
    """Start a span; `operation` as the GenAI conventions name it. Returns NO_SPAN unless the caller traces now."""
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
    """Wrap a span of the caller's own SDK or, without an SDK, the context that the caller received."""

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
