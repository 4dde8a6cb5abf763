"""A span while it lives and once it is over. Times are `time.monotonic_ns()` of this process.

Making one costs a few microseconds: ids, a dictionary. What OTLP wants of it is made by the sender's thread.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdmesh.runtime.telemetry.propagation import SpanContext

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
MAX_EVENTS = MAX_LINKS = 128


class Kind(enum.IntEnum):
    """As OTLP numbers them."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span."""

    name: str
    at_ns: int
    attributes: Attributes


class Span:
    """One span. Its `context` may be handed on at once; it is sent when it has ended. On one thread."""

    __slots__ = (
        "_attributes", "_emit", "context", "end_ns", "events", "is_failed", "kind", "links", "name", "num_dropped_events",
        "parent_id", "problem", "start_ns",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent_id: int,
        kind: Kind,
        start_ns: int,
        attributes: Attributes,
        emit: Callable[[Span], None],
    ) -> None:
        """`parent_id` 0: it is the root of its trace. `emit` takes it when it ends."""
        self.name = name
        self.context = context
        self.parent_id = parent_id
        self.kind = kind
        self.start_ns = start_ns
        self.end_ns = 0
        self.events: list[Event] = []
        self.links: Sequence[SpanContext] = ()
        self.num_dropped_events = 0
        self.is_failed = False
        self.problem = ""
        self._attributes = dict(attributes)
        self._emit = emit

    @property
    def attributes(self) -> Attributes:
        """All that were set."""
        return self._attributes

    @property
    def is_open(self) -> bool:
        """It has not ended."""
        return not self.end_ns

    def set(self, attributes: Attributes) -> None:
        """More attributes; the last word on each counts."""
        self._attributes.update(attributes)

    def event(self, name: str, at_ns: int | None = None, attributes: Attributes | None = None) -> None:
        """Something happened, just now if not at `at_ns`. Of very many the last are counted only."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(Event(name, time.monotonic_ns() if at_ns is None else at_ns, attributes or {}))
        else:
            self.num_dropped_events += 1

    def fail(self, error_type: str, problem: str = "") -> None:
        """What it stands for went wrong. `error_type` is one of few words; `problem` says it to people, without request text."""
        self.is_failed, self.problem = True, problem
        self._attributes["error.type"] = error_type

    def end(self, at_ns: int | None = None) -> None:
        """Over, just now if not at `at_ns`. Only the first call counts."""
        if not self.end_ns:
            self.end_ns = max(self.start_ns, time.monotonic_ns() if at_ns is None else at_ns)
            self._emit(self)
