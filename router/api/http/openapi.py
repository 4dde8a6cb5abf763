"""The description of all HTTP endpoints, made from the types of their bodies: `GET /openapi.json` (OpenAPI 3.1) and a page of it.

An API adds an endpoint as one `Endpoint` among its routes; a route without a description is listed without bodies.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, cast

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.http import docs_page
from router.api.http.body import Endpoint as Handler
from router.api.http.body import guarded, json_response
from router.api.http.errors import ErrorBody
from router.api.http.headers import API_KEY, REQUEST_ID, TENANT_HEADERS

Form = Any
"""A type of bodies, or a union of such types."""

VERSION = "3.1.0"
_ANY = {REQUEST_ID: "The id of the request; the answer has it, too."}
"""What counts for every endpoint."""
_SECURITY = {
    "key": {"type": "http", "scheme": "bearer", "description": "Needed where the router has API keys (--api-keys)."},
    "header_key": {"type": "apiKey", "in": "header", "name": API_KEY, "description": "The same key; a bearer's goes before it."},
}


NEEDS_ADMIN = "Where there are API keys, this needs one with admin."


@dataclass(frozen=True)
class Operation:
    """Describe an endpoint: what it is for, and the types of its request's body, of its answer, of an event's data where it
    streams, and of errors. `form`: the body is multipart/form-data with these fields. `raw`: the media type of an answer that is
    no JSON. `needs_key`: API keys are checked, where there are some; `needs_admin`: for one with admin. `has_options`: the tenant
    counts. `headers` and `query`: what else counts, with its meaning. `header`: one that requests must have, where other requests
    to the same path are another endpoint's."""

    summary: str
    body: Form = None
    answer: Form = None
    event: Form = None
    error: Form = ErrorBody
    needs_key: bool = True
    has_options: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    form: Form = None
    raw: str = ""
    header: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    needs_admin: bool = False


class Endpoint(Route):
    """A route with its description. Errors of `handler` become responses."""

    def __init__(
        self,
        path: str,
        handler: Handler,
        summary: str,
        *,
        method: str = "POST",
        body: Form = None,
        answer: Form = None,
        event: Form = None,
        error: Form = ErrorBody,
        needs_key: bool = True,
        has_options: bool = False,
        headers: Mapping[str, str] | None = None,
        form: Form = None,
        raw: str = "",
        header: str = "",
        query: Mapping[str, str] | None = None,
        needs_admin: bool = False,
        wrap: Callable[[Handler], Handler] = guarded,
    ) -> None:
        """`wrap` makes responses of errors, for an API that has a form of its own for them."""
        super().__init__(path, wrap(handler), methods=[method])
        self.operation = Operation(
            summary,
            body,
            answer,
            event,
            error,
            needs_key,
            has_options,
            headers or {},
            form,
            raw,
            header,
            query or {},
            needs_admin,
        )


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    forms = {id(form): form for route in routes for form in _forms(_operation(route))}
    refs, schemas = _schemas(forms)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operations, described = paths.setdefault(path, {}), _described(route, path, method, refs)
            other = operations.get(method.lower())
            operations[method.lower()] = described if other is None else _either(described, other)
    info = {"title": "pdmesh", "version": _version(), "summary": "LLMs over HTTP; prefill and decode are separated."}
    components = {"schemas": schemas, "securitySchemes": _SECURITY}
    return {"openapi": VERSION, "info": info, "paths": paths, "components": components}


def _operation(route: Route) -> Operation:
    return route.operation if isinstance(route, Endpoint) else Operation(route.name, error=None)


def _forms(operation: Operation) -> Iterator[Form]:
    forms = (operation.body, operation.form, operation.answer, operation.event, operation.error)
    return (form for form in forms if form is not None)


def _schemas(forms: dict[int, Form]) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Return the schema of each form, mostly a reference, and the definitions."""
    inputs = [(str(key), "validation", TypeAdapter(form)) for key, form in forms.items()]
    made, definitions = TypeAdapter.json_schemas(cast("Any", inputs), ref_template="#/components/schemas/{model}")
    refs = {int(key): _without_guesses(dict(schema)) for (key, _), schema in cast("dict[Any, Any]", made).items()}
    return refs, _without_guesses(definitions.get("$defs", {}))


def _without_guesses(value: Any) -> Any:
    """Return a schema that says "one of" only of forms that a field tells apart: of others several may fit."""
    if isinstance(value, list):
        return [_without_guesses(each) for each in value]
    if not isinstance(value, dict):
        return value
    name = "anyOf" if "discriminator" not in value else "oneOf"
    return {name if key == "oneOf" else key: _without_guesses(each) for key, each in value.items()}


def _described(route: Route, path: str, method: str, refs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    operation = _operation(route)
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": operation.summary,
        "parameters": [
            *_path_parameters(path),
            *(_parameter("query", name, what) for name, what in operation.query.items()),
            *(_parameter("header", name, what) for name, what in _headers(operation).items()),
        ],
        "responses": {"200": _answered(operation, refs)},
    }
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": _json(refs[id(operation.body)])}
    if operation.form is not None:
        made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": refs[id(operation.form)]}}}
    if operation.error is not None:
        made["responses"]["default"] = {"description": "An error", "content": _json(refs[id(operation.error)])}
    if operation.needs_admin:
        made["description"] = NEEDS_ADMIN
    if operation.needs_key and isinstance(route, Endpoint):
        made["security"] = [{}, *({name: []} for name in _SECURITY)]
    return made


def _headers(operation: Operation) -> dict[str, str]:
    tenant = TENANT_HEADERS if operation.has_options else {}
    version = {operation.header: "With it the answer is in the form of the API that has it."} if operation.header else {}
    return {**_ANY, **tenant, **operation.headers, **version}


def _answered(operation: Operation, refs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    content = {} if operation.answer is None else _json(refs[id(operation.answer)])
    if operation.raw:
        content[operation.raw] = {"schema": {"type": "string"}}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": refs[id(operation.event)]}
    return {"description": "The answer", **({"content": content} if content else {})}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _parameter(place: str, name: str, what: str) -> dict[str, Any]:
    return {"name": name, "in": place, "description": what, "schema": {"type": "string"}}


def _either(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the description of two endpoints with one path, which a header tells apart; most of it is that of `one`."""
    responses = {
        status: {**answer, "content": _json(_any_of(answer, other["responses"][status]))}
        for status, answer in one["responses"].items()
    }
    known = {(parameter["in"], parameter["name"]) for parameter in one["parameters"]}
    more = [each for each in other["parameters"] if (each["in"], each["name"]) not in known]
    return {**one, "parameters": [*one["parameters"], *more], "responses": responses}


def _any_of(*answers: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [answer["content"]["application/json"]["schema"] for answer in answers]}


def _version() -> str:
    try:
        return metadata.version("pdmesh")
    except metadata.PackageNotFoundError:
        return "0"


class _Description:
    """Serve the document and its page; both are made once, when they are first asked for, beside the event loop."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._made: asyncio.Future[tuple[dict[str, Any], str]] | None = None

    async def json(self, request: Request) -> Response:
        """Handle GET /openapi.json."""
        return json_response((await self._both())[0])

    async def page(self, request: Request) -> Response:
        """Handle GET /docs."""
        headers = {"content-security-policy": docs_page.POLICY}
        return Response((await self._both())[1], media_type="text/html", headers=headers)

    async def _both(self) -> tuple[dict[str, Any], str]:
        if self._made is None:
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)

    def _make(self) -> tuple[dict[str, Any], str]:
        made = document(self._routes)
        return made, docs_page.page(made)


def with_description(routes: Sequence[Route]) -> list[Route]:
    """Return the routes and two more, which describe them all."""
    described: list[Route] = [*routes]
    description = _Description(described)
    described += [
        Endpoint("/openapi.json", description.json, "This description", method="GET", answer=dict[str, Any], needs_key=False),
        Endpoint(
            "/docs", description.page, "A page of this description", method="GET", error=None, raw="text/html", needs_key=False
        ),
    ]
    return described
