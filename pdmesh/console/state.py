"""The state of the page as one JSON text, rebuilt only when something has changed, and its publication to all clients."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from typing import Any

from pdmesh.console import figures
from pdmesh.console.figures import Query
from pdmesh.console.store import RequestSummary, Store
from pdmesh.console.topology import Topology
from pdmesh.runtime.telemetry.received import ReceivedSpan

NUM_RECENT, NUM_SLOWEST, NUM_FOUND = 25, 25, 100
_SHOWN = tuple(field.name for field in fields(RequestSummary))


class State:
    """Combine store and topology."""

    def __init__(self, store: Store, topology: Topology, *, forwards_to: str = "") -> None:
        """Create it. `forwards_to`: the collector to which all traces are forwarded."""
        self._store, self._forwards_to = store, forwards_to
        self._topology = topology

    def snapshot(self) -> str:
        """Return JSON for a client: the routers are polled more often from then on."""
        self._topology.watch()
        now_s = time.time()
        self._store.prune(now_s)
        requests = list(self._store.requests())
        recent = heapq.nlargest(NUM_RECENT, requests, key=lambda request: request.end_s)
        ended = figures.latest(requests, now_s)
        return _json(
            {
                "at_s": now_s,
                "window": self._window(len(requests)),
                "rates": figures.rates(ended),
                "models": figures.by_model(requests),
                "flows": figures.flows(ended),
                "recent": [request_view(request) for request in recent],
                "slowest": [request_view(request) for request in figures.slowest(requests, NUM_SLOWEST)],
                **self._topology.view(),
            }
        )

    def found(self, query: Query) -> str:
        """Return JSON: the selected requests, the latest first; at most NUM_FOUND of `total`."""
        requests = sorted((each for each in self._store.requests() if query.takes(each)), key=lambda each: -each.end_s)
        return _json({"total": len(requests), "requests": [request_view(request) for request in requests[:NUM_FOUND]]})

    def trace(self, trace_id: str) -> str | None:
        """Return JSON: the spans of one trace, and engine steps that took part in it. None: it is not known."""
        spans = self._store.trace(trace_id)
        if spans is None:
            return None
        steps = self._store.steps_of(trace_id)
        requests = [request_view(each) for each in self._store.requests() if each.trace_id == trace_id]
        return _json(
            {
                "trace_id": trace_id,
                "requests": requests,
                "spans": [span_view(span) for span in spans],
                "steps": [span_view(span) for span in steps],
            }
        )

    def _window(self, num_requests: int) -> dict[str, Any]:
        bounds = self._store.bounds
        return {
            "num_requests": num_requests,
            "num_traces": self._store.num_traces,
            "max_traces": bounds.max_traces,
            "max_age_s": bounds.max_age_s,
            "num_bytes": self._store.num_bytes,
            "num_dropped_spans": self._store.num_dropped,
            "forwards_to": self._forwards_to,
        }


def request_view(request: RequestSummary) -> dict[str, Any]:
    """Return one request for the page."""
    # dataclasses.asdict also copies the fields' values, which would take most of a state's time.
    return {**{name: getattr(request, name) for name in _SHOWN}, "dominant": request.dominant()}


def span_view(span: ReceivedSpan) -> dict[str, Any]:
    """Return one span for the page; times in whole nanoseconds since 1970 as text: JavaScript's numbers lack the precision."""
    details = span.read()
    return {
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "kind": details.kind,
        "service": span.process.service,
        "instance": span.process.instance,
        "start_ns": str(span.start_ns),
        "end_ns": str(span.end_ns),
        "failed": details.is_failed,
        "problem": details.problem,
        "attributes": details.attributes,
        "events": [{"name": e.name, "at_ns": str(e.at_ns), "attributes": e.attributes} for e in details.events],
    }


def _json(value: object) -> str:
    """Return JSON for browsers, which do not accept NaN."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: object) -> object:
    """Return the value with numbers that are not finite as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


# Sends the latest state to all clients, at most once a second; slow clients get fewer updates.


MIN_PERIOD_S = 1.0  # the routers' polling period
KEEP_ALIVE_S = 10.0
MAX_CLIENTS = 32


class TooMany(Exception):
    """Raised when there are too many clients."""


class Events:
    """Publish one text to all clients, built once when it is due."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._changed = asyncio.Event()
        self._published = asyncio.Condition()
        self._text, self._number = "", 0
        self._num_clients = 0
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return self._num_clients

    def start(self) -> None:
        """Start publishing."""
        self._task = asyncio.create_task(self._run(), name="events")

    async def stop(self) -> None:
        """End all streams. Idempotent."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        async with self._published:
            self._published.notify_all()

    def changed(self) -> None:
        """Note a change."""
        self._changed.set()

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events for one client, the current state first. Raises TooMany."""
        if self._num_clients >= MAX_CLIENTS:
            raise TooMany
        self._num_clients += 1
        try:
            yield f"retry: 2000\ndata: {self._make()}\n\n"
            number = self._number
            while not self._is_closed:
                is_news = await self._wait(number)
                if is_news:
                    number = self._number
                yield f"data: {self._text}\n\n" if is_news else "event: alive\ndata:\n\n"
        finally:
            self._num_clients -= 1

    async def _wait(self, number: int) -> bool:
        """Wait until there is another state than `number`; return False if nothing has happened for a while."""
        async with self._published:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S / 2):
                    await self._published.wait_for(lambda: self._number != number or self._is_closed)
            except TimeoutError:
                return False
        return self._number != number

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._num_clients:
                self._text = self._make()
                async with self._published:
                    self._number += 1
                    self._published.notify_all()
            await asyncio.sleep(MIN_PERIOD_S)
