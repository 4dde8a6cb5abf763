"""The latest engine steps of a worker, for spans that are made when a request has gone through them. Monotonic nanoseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from pdmesh.runtime.telemetry.spans import Event, Value

MAX_STEPS = 2048


class Step(NamedTuple):
    """One engine step. `prefill_tokens` of all prompts in it; `num_decoding` tokens beside them."""

    number: int
    started_ns: int
    ended_ns: int
    prefill_tokens: int
    num_decoding: int


class StepLog:
    """Steps in order; the oldest are forgotten."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._steps: deque[Step] = deque(maxlen=max_steps)

    def add(self, step: Step) -> None:
        """The one after the latest."""
        self._steps.append(step)

    def of(self, number: int) -> Step | None:
        """None: forgotten, or never told."""
        offset = self._steps[-1].number - number if self._steps else -1
        return self._steps[-1 - offset] if 0 <= offset < len(self._steps) else None

    def between(self, started_ns: int, ended_ns: int) -> list[Step]:
        """Those with prompt tokens that lie within, in order."""
        found = []
        for step in reversed(self._steps):
            if step.started_ns < started_ns:
                break
            if step.ended_ns <= ended_ns and step.prefill_tokens:
                found.append(step)
        return found[::-1]


def chunk_events(steps: Iterable[Step], tokens: Mapping[int, int] | None = None) -> list[Event]:
    """One event for each step that computed a part of a prompt; `tokens` of the prompt by step, where they are known."""
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
