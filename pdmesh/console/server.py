"""Serves the page and its data over HTTP.

/                     the page; /page/… its files
/api/state            all that it shows; /api/events the same repeatedly, as server-sent events
/api/requests         those in one bar of a histogram: ?model=&metric=ttft_ms|tpot_ms&from_ms=&to_ms=
/api/traces/{id}      the spans of a trace; with ?soon none instead of 404 while it is not there
/api/generate         POST a prompt; the answer comes as lines of JSON
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
from collections.abc import AsyncIterator, Collection
from importlib import resources
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdmesh.console import prompting
from pdmesh.console.figures import METRICS, Query
from pdmesh.console.prompting import BadPrompt, Mesh
from pdmesh.console.state import MAX_CLIENTS, Events, State

# Protection against other sites' pages, by the headers that a browser sends.
#
# - a name that was made to point here (DNS rebinding) appears in Host, and is not accepted;
# - another site's form or script appears in Origin and Sec-Fetch-Site, and only our own page may use the API.


HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
_LOCAL = frozenset({"localhost"})
_SAFE = frozenset({"GET", "HEAD"})


class Guard:
    """Wrap an application."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str]) -> None:
        self._app = app
        self._allowed = _LOCAL | {name.lower() for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, as ASGI."""
        if scope["type"] != "http":
            return
        problem = self._problem(scope["method"], scope["path"], Headers(scope=scope))
        if problem:
            await PlainTextResponse(problem + "\n", status_code=403, headers=HEADERS)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)

    def _problem(self, method: str, path: str, headers: Headers) -> str:
        """Return why the request is rejected; "" if it is not."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return "this console does not answer to that Host; --allowed-hosts names more"
        if method in _SAFE and not path.startswith("/api/"):  # a link to the page may come from anywhere
            return ""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        if (origin is not None and _netloc(origin) != hosts[0].lower()) or site not in ("same-origin", "none"):
            return "only the console's own page may do that"
        return ""

    def _is_ours(self, host: str) -> bool:
        """Return whether the host is ours; addresses are: no name was resolved to get here."""
        name = _hostname(host)
        return name is not None and (name in self._allowed or _is_address(name))


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


MAX_BODY_BYTES = 128 << 10
MAX_PROMPTS = 8
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


class Console:
    """Hold the endpoints."""

    def __init__(self, state: State, events: Events, mesh: Mesh) -> None:
        self._state = state
        self._events = events
        self._mesh = mesh
        self._files = _page_files()
        self._num_prompts = 0

    def app(self, allowed_hosts: Collection[str]) -> ASGIApp:
        """Return the guarded app."""
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
        """Return a file of the page."""
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise HTTPException(404, "there is no such file")
        body, kind = self._files[name]
        return Response(body, media_type=kind)

    async def state(self, request: Request) -> Response:
        """Return all that the page shows."""
        return _json(self._state.snapshot())

    async def events(self, request: Request) -> Response:
        """Stream the state repeatedly."""
        if self._events.num_clients >= MAX_CLIENTS:
            raise HTTPException(503, f"{MAX_CLIENTS} pages are connected already")
        return StreamingResponse(self._events.stream(), media_type="text/event-stream")

    async def requests(self, request: Request) -> Response:
        """Return the requests in one bar."""
        return _json(self._state.found(_query(request)))

    async def trace(self, request: Request) -> Response:
        """Return one trace."""
        trace_id = request.path_params["trace_id"].lower()
        found = self._state.trace(trace_id) if _TRACE_ID.fullmatch(trace_id) else None
        if found is None and "soon" in request.query_params:
            return _json('{"requests":[],"spans":[],"steps":[]}')
        if found is None:
            raise HTTPException(404, "this trace is not here: it has not arrived yet, or was evicted for newer ones")
        return _json(found)

    async def generate(self, request: Request) -> Response:
        """Send a prompt to the mesh."""
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
    """Return body and type by name: nothing but these is ever served."""
    folder = resources.files("pdmesh.console") / "page"
    return {
        entry.name: (entry.read_bytes(), _TYPES[suffix])
        for entry in folder.iterdir()
        if (suffix := "." + entry.name.rpartition(".")[2]) in _TYPES
    }
