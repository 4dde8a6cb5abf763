"""The context of a trace as it travels between processes: W3C Trace Context, in gRPC metadata and HTTP headers.

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01      version, trace, span, flags
    tracestate: vendor=value,other=value                                      handed on as it came

What cannot be read is ignored, as the standard says: the trace begins anew, and nobody gets an error.
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
    """Which span of which trace. `is_sampled`: whoever began the trace sends its spans. `state`: a tracestate, "" without one."""

    trace_id: int
    span_id: int
    is_sampled: bool = True
    state: str = ""

    @property
    def trace_name(self) -> str:
        """The trace's id as people and logs write it."""
        return f"{self.trace_id:032x}"


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> SpanContext | None:
    """The context of a call's metadata or of headers, whatever their case; None without one that can be read."""
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
    """Without state; None for what is none. Of a later version what is known of it counts."""
    match = _PARENT.fullmatch(traceparent.strip(" \t"))
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, bool(int(match[4], 16) & SAMPLED))


def inject(context: SpanContext | None) -> Metadata:
    """What to send along with a call; nothing without a context."""
    if context is None:
        return ()
    parent = (TRACEPARENT, format_parent(context))
    return (parent, (TRACESTATE, context.state)) if context.state else (parent,)


def format_parent(context: SpanContext) -> str:
    """A traceparent."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{'01' if context.is_sampled else '00'}"


def _checked_state(text: str) -> str:
    """As it came, without empty members; "" if anything in it breaks the rules, or it is longer than has to be handed on."""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {match["key"] for match in found if match is not None}
    if len(members) > _MAX_MEMBERS or len(keys) != len(members):
        return ""
    state = ",".join(members)
    return state if len(state) <= MAX_STATE_CHARS else ""


# What a Submit carries of the trace: who calls, and whose child all is that decode does after it has answered.
#
# traceparent          the Submit call: parent of what happens until its answer
# pdmesh-attempt       the attempt at placing: parent of `decode`, which may last for minutes


ATTEMPT = "pdmesh-attempt"


@dataclass(frozen=True)
class SubmitContext:
    """The spans of the router that a Submit belongs to."""

    call: SpanContext
    attempt: SpanContext


def submit_metadata(call: SpanContext, attempt: SpanContext) -> Metadata:
    """Metadata of the Submit call."""
    return (*inject(call), (ATTEMPT, format_parent(attempt)))


def read_submit(metadata: Iterable[tuple[str, str | bytes]] | None) -> SubmitContext | None:
    """None: the router does not trace this request, or says so unreadably. Callers that know nothing of attempts have one."""
    pairs = tuple(metadata or ())
    call = extract(pairs)
    if call is None:
        return None
    named = [value for key, value in pairs if key == ATTEMPT and isinstance(value, str)]
    attempt = parse(named[0]) if len(named) == 1 else None
    return SubmitContext(call, call if attempt is None or attempt.trace_id != call.trace_id else attempt)


# The client library within its caller's trace, where the caller has OpenTelemetry: nothing is installed or imported for it.
#
# A caller that traces has imported OpenTelemetry's API, so that is asked, and only that. Then a request is a span of the
# caller's, of kind CLIENT, below the one that is current where the request is made; and the router goes on below it.


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
