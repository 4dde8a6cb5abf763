"""Which traces are sent: a share by their ids, decided at the beginning; and at the end those of requests that went badly.

sampled at the beginning ─► sent as its spans end
not sampled ─► held, the oldest traces give way ─┬─ kept: what is held is sent, and what still comes
                                                 └─ else forgotten
"""

from __future__ import annotations

from collections import OrderedDict

from pdmesh.runtime.telemetry.spans import Span

MAX_KEPT = 4096  # traces of which something may still come
_RANGE = 1 << 64


def is_sampled(trace_id: int, share: float) -> bool:
    """Decides alike wherever it is asked: by the lower 64 bits of the id, as OpenTelemetry's samplers do."""
    return trace_id % _RANGE < round(share * _RANGE)


class Held:
    """Spans of traces that nobody has asked for, at most `max_spans`."""

    def __init__(self, max_spans: int) -> None:
        self._max_spans = max_spans
        self._traces: OrderedDict[int, list[Span]] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.num_spans = 0

    def hold(self, span: Span) -> bool:
        """False: its trace was asked for, send it."""
        trace_id = span.context.trace_id
        if trace_id in self._kept:
            return False
        self._traces.setdefault(trace_id, []).append(span)
        self.num_spans += 1
        while self.num_spans > self._max_spans:
            self.num_spans -= len(self._traces.popitem(last=False)[1])
        return True

    def keep(self, trace_id: int) -> list[Span]:
        """What is held of a trace, to be sent; what comes of it later is not held any more."""
        self._kept[trace_id] = None
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        spans = self._traces.pop(trace_id, [])
        self.num_spans -= len(spans)
        return spans
