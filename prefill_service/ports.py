"""What the prefill service needs of the worker around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from pdmesh.engine.engine import Engine
from pdmesh.engine.outputs import KVReady, RequestStarted, SequenceUpdate

T = TypeVar("T")


class EngineCalls(Protocol):
    """The engine's thread (`pdmesh.engine.loop.EngineLoop`)."""

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """Runs `fn` between two steps."""


class Sink(Protocol):
    """Who hears of one engine request. Called on the event loop, in order; updates of a step before `on_started` of that step."""

    def on_update(self, update: SequenceUpdate) -> None: ...

    def on_started(self, started: RequestStarted, ended_ns: int) -> None: ...


class Sinks(Protocol):
    """The engine's results by engine request id (`pdmesh.worker.step_dispatcher.Dispatcher`)."""

    def add(self, engine_id: str, sink: Sink, on_ready: Callable[[KVReady], None] | None = None) -> None: ...

    def remove(self, engine_id: str) -> None: ...
