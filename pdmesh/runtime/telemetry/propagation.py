"""The context of a trace as it travels between processes: W3C Trace Context, in gRPC metadata and HTTP headers.

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01      version, trace, span, flags
    tracestate: vendor=value,other=value                                      handed on as it came

What cannot be read is ignored, as the standard says: the trace begins anew, and nobody gets an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
