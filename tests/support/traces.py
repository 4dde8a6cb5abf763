"""Reading a request's trace, as a collector has got it from all processes of a mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from tests.support.otlp_receiver import OtlpReceiver, Received

ROUTER_SPANS = {"route", "admission", "attempt", "reserve", "first_token_return"}
REMOTE_SPANS = ROUTER_SPANS | {
    "prefill", "submit", "prefill.queue", "prefill.compute", "kv.push", "kv.exposed", "decode", "decode.queue",
}  # fmt: skip
LOCAL_SPANS = ROUTER_SPANS | {"submit", "prefill.queue", "prefill.compute", "decode"}


@dataclass(frozen=True, eq=False)
class Trace:
    """All spans of one request."""

    root: Received
    spans: Sequence[Received]

    @property
    def names(self) -> set[str]:
        return {span.name for span in self.spans}

    def all(self, name: str) -> list[Received]:
        """By time."""
        return [span for span in self.spans if span.name == name]

    def of(self, name: str, process: str) -> list[Received]:
        """Those of processes whose names begin so: a router's and a worker's `prefill` are two spans."""
        return [span for span in self.all(name) if span.process.startswith(process)]

    def parent(self, span: Received) -> Received:
        """Raises ValueError for one that is not there."""
        (found,) = (each for each in self.spans if each.span_id == span.parent_id)
        return found

    def path(self, span: Received) -> str | None:
        """Names from the root on, each with the kind of its process: `generate@router/attempt@router/reserve@router`. None: one
        of its parents is not there."""
        step = f"{span.name.split()[0]}@{span.process.partition('-')[0]}"
        if span is self.root:
            return step
        parent = next((each for each in self.spans if each.span_id == span.parent_id), None)
        above = None if parent is None else self.path(parent)
        return above and f"{above}/{step}"

    def below(self, top: Received) -> list[Received]:
        """`top`'s descendants."""
        children = [span for span in self.spans if span.parent_id == top.span_id]
        return children + [span for child in children for span in self.below(child)]

    @property
    def ttft_ms(self) -> float:
        """As the router has measured it, whole."""
        return float(self.root.attributes["pdmesh.ttft_ms"])  # type: ignore[arg-type]

    @property
    def missing_ms(self) -> float:
        """Of TTFT, what is in none of its parts."""
        return self.ttft_ms - sum(self.ttft_parts_ms().values())

    def ttft_parts_ms(self) -> dict[str, float]:
        """What TTFT consists of. What a failed attempt took is retry. LOCAL: the prompt waits for no answer to Submit, so of that
        call `submit` counts, which ends when the engine has the prompt."""
        last = next(attempt for attempt in self.all("attempt") if not attempt.is_failed)
        attempt = self.below(last)
        reserving = "submit" if last.attributes["pdmesh.mode"] == "local" else "reserve"
        mine = [span for span in self.spans if span.parent_id == self.root.span_id and span.end_ns <= last.end_ns]
        parts = {
            "route": _ms(span for span in mine if span.name == "route"),
            "admission": _ms(span for span in mine if span.name == "admission"),
            "retry": _ms(span for span in mine if span.name == "retry"),
            "reserve": _ms(span for span in attempt if span.name == reserving),
            "first_token_return": _ms(self.all("first_token_return")),
        }
        for name in ("prefill.queue", "prefill.compute"):
            parts[name] = _ms(span for span in attempt if span.name == name)
        return parts

    def gap_parts_ms(self) -> dict[str, float]:
        """What the hand-off adds behind the first token."""
        return {name: _ms(self.all(name)) for name in ("kv.exposed", "decode.queue")}


def _ms(spans: Iterable[Received]) -> float:
    return sum(span.duration_ns for span in spans) / 1e6


def trace_so_far(spans: Sequence[Received], request_id: str) -> Trace | None:
    """What there is of it; None before its root, which names the request, is there."""
    root = next((span for span in spans if span.attributes.get("gen_ai.response.id") == request_id), None)
    if root is None:
        return None
    return Trace(root, sorted((span for span in spans if span.trace_id == root.trace_id), key=lambda span: span.start_ns))


async def trace_of(
    receiver: OtlpReceiver, request_id: str, wanted: Set[str], enough: Callable[[Trace], bool], timeout_s: float = 20.0
) -> Trace:
    """Of the request of that id, once all `wanted` names are there and it is `enough`: each process sends in its own time.
    AssertionError after the time."""

    def is_complete(spans: list[Received]) -> bool:
        trace = trace_so_far(spans, request_id)
        return trace is not None and wanted <= trace.names and enough(trace)

    trace = trace_so_far(await asyncio.to_thread(receiver.wait, is_complete, timeout_s), request_id)
    assert trace is not None
    return trace
