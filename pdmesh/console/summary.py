"""What one request was like, from the attributes of its router's `generate` span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdmesh.runtime.telemetry.received import Details, ReceivedSpan, Value

SERVICE = "pdmesh-router"
TTFT_PARTS = ("route", "admission_queue", "reserve", "prefill_queue", "prefill_compute", "first_token_return", "retry")
"""In the order in which they happen; together they are the time to the first token."""
LATER_PARTS = ("kv_exposed", "decode_queue")


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One request. Times in milliseconds, None where there is none; `start_s` since 1970.

    `parts` of its TTFT and of what follows. `met`: whether it kept its objectives, None without any. `error` is a word,
    "" for none."""

    trace_id: str
    span_id: str
    request_id: str
    model: str
    router: str
    prefill_worker: str
    decode_worker: str
    mode: str
    start_s: float
    total_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    objective_ttft_ms: float | None
    objective_tpot_ms: float | None
    met: bool | None
    parts: Mapping[str, float]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    kv_bytes: int
    error: str
    tenant: str
    priority: str

    @property
    def end_s(self) -> float:
        """Since 1970."""
        return self.start_s + self.total_ms / 1000

    def dominant(self) -> str:
        """The part that took most of the time to the first token; "" without one."""
        parts = {name: self.parts[name] for name in TTFT_PARTS if self.parts.get(name)}
        return max(parts, key=lambda name: parts[name]) if parts else ""


def is_request(span: ReceivedSpan) -> bool:
    """Whether it is a router's `generate`: the caller's own may be above it."""
    return span.process.service == SERVICE and (span.name == "generate" or span.name.startswith("generate "))


def summarize(span: ReceivedSpan) -> RequestSummary:
    """Of a span that is one's. What it does not say, or says in another type, is left out."""
    details = span.read()
    said = details.attributes
    return RequestSummary(
        trace_id=span.trace_id,
        span_id=span.span_id,
        request_id=_text(said, "gen_ai.response.id"),
        model=_text(said, "gen_ai.response.model") or _text(said, "gen_ai.request.model"),
        router=span.process.instance,
        prefill_worker=_text(said, "pdmesh.prefill.worker"),
        decode_worker=_text(said, "pdmesh.decode.worker"),
        mode=_text(said, "pdmesh.mode"),
        start_s=span.start_ns / 1e9,
        total_ms=(span.end_ns - span.start_ns) / 1e6,
        ttft_ms=_positive(said, "pdmesh.ttft_ms"),
        tpot_ms=_positive(said, "pdmesh.tpot_ms"),
        objective_ttft_ms=_positive(said, "pdmesh.slo.ttft_ms"),
        objective_tpot_ms=_positive(said, "pdmesh.slo.tpot_ms"),
        met=_flag(said, "pdmesh.slo.met"),
        parts={name: _number(said, f"pdmesh.timing.{name}_ms") or 0.0 for name in (*TTFT_PARTS, *LATER_PARTS)},
        input_tokens=_count(said, "gen_ai.usage.input_tokens"),
        output_tokens=_count(said, "gen_ai.usage.output_tokens"),
        cached_tokens=_count(said, "pdmesh.cached_tokens"),
        kv_bytes=_count(said, "pdmesh.kv.bytes"),
        error=_error(details),
        tenant=_text(said, "pdmesh.tenant"),
        priority=_text(said, "pdmesh.priority"),
    )


def _error(details: Details) -> str:
    return _text(details.attributes, "error.type") or ("ERROR" if details.is_failed else "")


def _text(said: Mapping[str, Value], name: str) -> str:
    value = said.get(name)
    return value[:200] if isinstance(value, str) else ""


def _number(said: Mapping[str, Value], name: str) -> float | None:
    value = said.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e12 else None  # type: ignore[arg-type, operator]


def _positive(said: Mapping[str, Value], name: str) -> float | None:
    return _number(said, name) or None


def _count(said: Mapping[str, Value], name: str) -> int:
    return int(_number(said, name) or 0)


def _flag(said: Mapping[str, Value], name: str) -> bool | None:
    value = said.get(name)
    return value if isinstance(value, bool) else None
