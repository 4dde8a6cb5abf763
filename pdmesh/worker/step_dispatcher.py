"""The engine's results, once per step, to whoever waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdmesh.engine.outputs import KVReady, RequestStarted, SequenceUpdate, StepResult


class Sink(Protocol):
    """Who hears of one engine request: updates of a step first, then, once, that it has started with this step."""

    def on_update(self, update: SequenceUpdate) -> None: ...

    def on_started(self, started: RequestStarted, ended_ns: int) -> None: ...


class Dispatcher:
    """Sinks by engine request id. What comes for an id that was removed is dropped: the request was released meanwhile."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sinks: dict[str, Sink] = {}
        self._readers: dict[str, Callable[[KVReady], None]] = {}

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, engine_id: str, sink: Sink, on_ready: Callable[[KVReady], None] | None = None) -> None:
        """`on_ready` hears how far the KV of a prefill_only request is, before the end of a step and at it."""
        self._sinks[engine_id] = sink
        if on_ready is not None:
            self._readers[engine_id] = on_ready

    def remove(self, engine_id: str) -> None:
        self._sinks.pop(engine_id, None)
        self._readers.pop(engine_id, None)

    def on_ready(self, ready: tuple[KVReady, ...]) -> None:
        """Called by the engine loop on the event loop."""
        for each in ready:
            reader = self._readers.get(each.request_id)
            if reader is not None:
                reader(each)

    def on_step(self, result: StepResult) -> None:
        """Called by the engine loop on the event loop."""
        self.num_steps = result.step
        self.on_ready(result.ready)
        # Looked up before anything is told: a request that ends with this step may remove its sink on its last update.
        started = [(self._sinks.get(started.request_id), started) for started in result.started]
        for update in result.updates:
            sink = self._sinks.get(update.request_id)
            if sink is not None:
                sink.on_update(update)
        for starter, news in started:
            if starter is not None:
                starter.on_started(news, result.ended_ns)
