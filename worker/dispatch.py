"""The engine's results, once per step, to whoever waits for them."""

from __future__ import annotations

from typing import Protocol

from engine.outputs import RequestStarted, SequenceUpdate, StepResult


class Sink(Protocol):
    """Who hears of one engine request: updates of a step first, then, once, that it has started with this step."""

    def on_update(self, update: SequenceUpdate) -> None: ...

    def on_started(self, started: RequestStarted, ended_ns: int) -> None: ...


class Dispatcher:
    """Sinks by engine request id. What comes for an id that was removed is dropped: the request was released meanwhile."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sinks: dict[str, Sink] = {}

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, engine_id: str, sink: Sink) -> None:
        self._sinks[engine_id] = sink

    def remove(self, engine_id: str) -> None:
        self._sinks.pop(engine_id, None)

    def on_step(self, result: StepResult) -> None:
        """Called by the engine loop on the event loop."""
        self.num_steps = result.step
        # Looked up before anything is told: a request that ends with this step may remove its sink on its last update.
        started = [(self._sinks.get(started.request_id), started) for started in result.started]
        for update in result.updates:
            sink = self._sinks.get(update.request_id)
            if sink is not None:
                sink.on_update(update)
        for starter, news in started:
            if starter is not None:
                starter.on_started(news, result.ended_ns)
