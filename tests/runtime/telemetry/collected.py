"""An outbox that keeps what it is given."""

from __future__ import annotations

from pdmesh.runtime.telemetry.spans import Span


class Collected:
    """Spans in the order of their ends."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def close(self, timeout_s: float) -> None:
        pass

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]
