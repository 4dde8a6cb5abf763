"""The page and what it asks for, over HTTP.

/                     the page; /page/… what it is made of
/api/state            all that it shows; /api/events the same again and again, as server-sent events
/api/requests         those in one bar of a histogram: ?model=&metric=ttft_ms|tpot_ms&from_ms=&to_ms=
/api/traces/{id}      the spans of a trace; with ?soon none instead of 404 while it is not there
/api/generate         POST a prompt; the answer comes as lines of JSON
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import AsyncIterator, Collection
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from pdmesh.console import prompting
from pdmesh.console.events import MAX_CLIENTS, Events
from pdmesh.console.figures import METRICS, Query
from pdmesh.console.guard import Guard
from pdmesh.console.prompting import BadPrompt, Mesh
from pdmesh.console.state import State

MAX_BODY_BYTES = 128 << 10
MAX_PROMPTS = 8
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


class Console:
    """The endpoints."""

    def __init__(self, state: State, events: Events, mesh: Mesh) -> None:
        self._state = state
        self._events = events
        self._mesh = mesh
        self._files = _page_files()
        self._num_prompts = 0

    def app(self, allowed_hosts: Collection[str]) -> ASGIApp:
        """Guarded."""
        routes = [
            Route("/", self.page, methods=["GET"]),
            Route("/page/{name}", self.page, methods=["GET"]),
            Route("/api/state", self.state, methods=["GET"]),
            Route("/api/events", self.events, methods=["GET"]),
            Route("/api/requests", self.requests, methods=["GET"]),
            Route("/api/traces/{trace_id}", self.trace, methods=["GET"]),
            Route("/api/generate", self.generate, methods=["POST"]),
        ]
        return Guard(Starlette(routes=routes, exception_handlers={HTTPException: _problem}), allowed_hosts)

    async def page(self, request: Request) -> Response:
        """A file of the page."""
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise HTTPException(404, "there is no such file")
        body, kind = self._files[name]
        return Response(body, media_type=kind)

    async def state(self, request: Request) -> Response:
        """All that the page shows."""
        return _json(self._state.snapshot())

    async def events(self, request: Request) -> Response:
        """The same again and again."""
        if self._events.num_clients >= MAX_CLIENTS:
            raise HTTPException(503, f"{MAX_CLIENTS} pages look already")
        return StreamingResponse(self._events.stream(), media_type="text/event-stream")

    async def requests(self, request: Request) -> Response:
        """Those in one bar."""
        return _json(self._state.found(_query(request)))

    async def trace(self, request: Request) -> Response:
        """One of them."""
        trace_id = request.path_params["trace_id"].lower()
        found = self._state.trace(trace_id) if _TRACE_ID.fullmatch(trace_id) else None
        if found is None and "soon" in request.query_params:
            return _json('{"requests":[],"spans":[],"steps":[]}')
        if found is None:
            raise HTTPException(404, "this trace is not here: it has not arrived yet, or had to give way to newer ones")
        return _json(found)

    async def generate(self, request: Request) -> Response:
        """A prompt to the mesh."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send application/json")
        try:
            prompt = prompting.read_prompt(await _body(request))
        except BadPrompt as error:
            raise HTTPException(400, str(error)) from None
        if self._num_prompts >= MAX_PROMPTS:
            raise HTTPException(503, f"{MAX_PROMPTS} prompts are being answered already")
        return StreamingResponse(self._answer(prompt), media_type="application/x-ndjson")

    async def _answer(self, prompt: prompting.Prompt) -> AsyncIterator[str]:
        self._num_prompts += 1
        try:
            async with contextlib.aclosing(prompting.answer(self._mesh, prompt)) as lines:
                async for line in lines:
                    yield line
        finally:
            self._num_prompts -= 1


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"more than {MAX_BODY_BYTES} bytes")
    return body


def _query(request: Request) -> Query:
    given = request.query_params
    metric = given.get("metric", "ttft_ms")
    if metric not in METRICS:
        raise HTTPException(400, f"metric: must be one of {', '.join(METRICS)}")
    try:
        from_ms, to_ms = float(given.get("from_ms", "0")), float(given.get("to_ms", "inf"))
    except ValueError:
        raise HTTPException(400, "from_ms, to_ms: must be numbers") from None
    if math.isnan(from_ms) or math.isnan(to_ms):
        raise HTTPException(400, "from_ms, to_ms: must be numbers")
    return Query(given.get("model", ""), metric, from_ms, to_ms)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


def _page_files() -> dict[str, tuple[bytes, str]]:
    """Body and type by name: nothing but these is ever served."""
    folder = resources.files("pdmesh.console") / "page"
    return {
        entry.name: (entry.read_bytes(), _TYPES[suffix])
        for entry in folder.iterdir()
        if (suffix := "." + entry.name.rpartition(".")[2]) in _TYPES
    }
