"""A trace for each decision that changes something: what was decided, why, and what came of it.

    autoscale.decide    from the look at the routers to the last order
        decided         event: orders follow
        flip, scale     event for each order that was carried out

A round that changes nothing leaves none, nor one that repeats what the latest trace has told of: orders that nobody carries out,
as in a dry run, or that fail again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdmesh.autoscaler.decision import Decision
from pdmesh.autoscaler.platform import PlatformError
from pdmesh.runtime.telemetry.spans import Attributes, Span, Value
from pdmesh.runtime.telemetry.tracing import OFF, Tracing

NAME = "autoscale.decide"
_Told = tuple[list[tuple[str, Attributes]], bool]


class DecisionSpans:
    """Of one loop."""

    def __init__(self, tracing: Tracing = OFF) -> None:
        self._tracing = tracing
        self._told: _Told = ([], False)

    @contextmanager
    def around(self, decision: Decision, began_ns: int) -> Iterator[Span]:
        """Gives the span while the orders are carried out; each is an event of it. `began_ns`: of the round, monotonic."""
        span = self._tracing.begin(NAME, None, start_ns=began_ns, attributes=_attributes(decision))
        span.event("decided")
        try:
            yield span
        except Exception as error:
            span.fail(type(error).__name__, str(error) if isinstance(error, PlatformError) else "")
            raise
        finally:
            self._tell(span)

    def _tell(self, span: Span) -> None:
        """Whatever the share of requests whose traces are sent: decisions are few."""
        orders = [(event.name, event.attributes) for event in span.events[1:]]
        is_news = (orders, span.is_failed) not in (([], False), self._told)
        self._told = (orders, span.is_failed)
        if is_news:
            self._tracing.keep((span.context.trace_id,))
            span.end()


def _attributes(decision: Decision) -> Attributes:
    attributes: dict[str, Value] = {}
    for pool in decision.pools:
        prefix = f"pdmesh.autoscale.{pool.name.value}"
        attributes |= {
            f"{prefix}.before": pool.before,
            f"{prefix}.replicas": pool.replicas,
            f"{prefix}.reason": pool.reason,
            f"{prefix}.held": pool.held or "",
        }
    return {**attributes, "pdmesh.autoscale.flips": [str(flip) for flip in decision.flips]}
