"""Spans, live and ended, and the step log from which some are made. Times are `time.monotonic_ns()` of this process.

Making one costs a few microseconds: ids, a dictionary. The sender's thread encodes it for OTLP.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from pdmesh.runtime.errors import Cancelled, InvalidArgument, MeshError, NotFound
from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.v1 import common_pb2

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
MAX_EVENTS = MAX_LINKS = 128


class Kind(enum.IntEnum):
    """Number the kinds as OTLP does."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class Event:
    """Describe an event within a span."""

    name: str
    at_ns: int
    attributes: Attributes


class Span:
    """Record one span. Its `context` may be passed on at once; it is sent when it has ended. On one thread."""

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
        """Start a span. `parent_id` 0: it is the root of its trace. `emit` receives it when it ends."""
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
        """Return all attributes that were set."""
        return self._attributes

    @property
    def is_open(self) -> bool:
        """Return whether it has not ended."""
        return not self.end_ns

    def set(self, attributes: Attributes) -> None:
        """Set more attributes; the last value of each counts."""
        self._attributes.update(attributes)

    def event(self, name: str, at_ns: int | None = None, attributes: Attributes | None = None) -> None:
        """Add an event, now or at `at_ns`. Beyond a bound events are only counted."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(Event(name, time.monotonic_ns() if at_ns is None else at_ns, attributes or {}))
        else:
            self.num_dropped_events += 1

    def fail(self, error_type: str, problem: str = "") -> None:
        """Mark the span as failed. `error_type` is one of few words; `problem` describes it for people, without request text."""
        self.is_failed, self.problem = True, problem
        self._attributes["error.type"] = error_type

    def end(self, at_ns: int | None = None) -> None:
        """End the span, now or at `at_ns`. Only the first call counts."""
        if not self.end_ns:
            self.end_ns = max(self.start_ns, time.monotonic_ns() if at_ns is None else at_ns)
            self._emit(self)


# The outcome of a request in words that a span may hold: nothing of the request's text.


def problem_of(error: BaseException) -> tuple[str, str]:
    """Return `error.type` and a description. Of a caller's mistake only the field is named: messages quote it. Of foreign errors
    only the type is known to be harmless."""
    if isinstance(error, (GeneratorExit, asyncio.CancelledError)):
        return Cancelled.default_code.name, "the caller left"
    if not isinstance(error, MeshError):
        return type(error).__name__, ""
    if isinstance(error, (InvalidArgument, NotFound)):
        return error.code.name, error.field or ""
    return error.code.name, error.message


def finish_word(reason: common_pb2.FinishReason.ValueType) -> str:
    """Return why a choice ended, as the GenAI conventions write it."""
    if reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        return "unfinished"
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def is_departure(error_type: str) -> bool:
    """Return whether the client left, which is not an error."""
    return error_type == Cancelled.default_code.name


# The latest engine steps of a worker, for spans that are made when a request has gone through them. Monotonic nanoseconds.


MAX_STEPS = 2048


class Step(NamedTuple):
    """Describe one engine step. `prefill_tokens` of all prompts in it; `num_decoding` tokens beside them."""

    number: int
    started_ns: int
    ended_ns: int
    prefill_tokens: int
    num_decoding: int


class StepLog:
    """Keep steps in order; the oldest are forgotten."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._steps: deque[Step] = deque(maxlen=max_steps)

    def add(self, step: Step) -> None:
        """Add the step after the latest."""
        self._steps.append(step)

    def of(self, number: int) -> Step | None:
        """Return the step; None: forgotten or never added."""
        offset = self._steps[-1].number - number if self._steps else -1
        return self._steps[-1 - offset] if 0 <= offset < len(self._steps) else None

    def between(self, started_ns: int, ended_ns: int) -> list[Step]:
        """Return the steps with prompt tokens that end within, in order: a request may come while a step is being planned."""
        found = []
        for step in reversed(self._steps):
            if step.ended_ns <= started_ns:
                break
            if step.ended_ns <= ended_ns and step.prefill_tokens:
                found.append(step)
        return found[::-1]


def chunk_events(steps: Iterable[Step], tokens: Mapping[int, int] | None = None) -> list[Event]:
    """Return one event for each step that computed a part of a prompt; `tokens` of the prompt by step, where they are known."""
    events = []
    for step in islice(steps, MAX_STEPS):
        attributes: dict[str, Value] = {
            "pdmesh.step": step.number,
            "pdmesh.duration_ms": (step.ended_ns - step.started_ns) / 1e6,
            "pdmesh.step.prefill_tokens": step.prefill_tokens,
            "pdmesh.step.num_decoding": step.num_decoding,
        }
        if tokens is not None and step.number in tokens:
            attributes["pdmesh.tokens"] = tokens[step.number]
        events.append(Event("chunk", step.ended_ns, attributes))
    return events
