"""Sessions over HTTP: what bodies and headers of all generating endpoints say of them, and `DELETE /v1/sessions/{session_id}`.

Sessions, retention and priorities have many names: those of vLLM, OpenAI, Dynamo and of coding agents are read here, from bodies
and headers, into `RequestOptions`. docs/sessions.md lists them with their sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, WithJsonSchema
from starlette.datastructures import Headers
from starlette.requests import Request, cookie_parser
from starlette.responses import Response
from starlette.routing import Route

from pdmesh.v1 import mesh_pb2
from router.api.frontend import SESSION, SESSION_FINAL, Frontend, truth
from router.api.http.body import HttpSettings, json_response
from router.api.http.fields import shown
from router.api.http.headers import AGENT_HEADERS, DYNAMO_FINAL, DYNAMO_SESSION, authorization_of, options_of, request_id_of
from router.api.http.openapi import Endpoint
from router.api.http.types import AnswerBody, Body, Hint, Text
from router.api.validation import MAX_PRIORITY_HINT, MAX_RETENTION_S, check_session_id, is_session_id, refuse
from router.auth import identity

# Sessions, retention and priorities, as bodies say them.

_DURATION = re.compile(r"([0-9]{1,9})([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
CACHE_CONTROL_S = 300
"""What `cache_control` means without a ttl: Anthropic's five minutes."""
SESSION_TIMEOUT_S = 300
SESSION_COOKIE = "llm-d-session"
"""The cookie in which llm-d's session-id-producer finds a session, by the name that its documentation gives it."""


def _session_id(text: str) -> str:
    if not is_session_id(text):
        raise ValueError(f"its {len(text)} characters are not 1 to 256 printable ones of ASCII without spaces")
    return text


def _duration(value: object) -> int:
    """Return seconds, at most a day: a longer wish is a wish for the longest."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        return min(MAX_RETENTION_S, int(found[1]) * _SECONDS[found[2]])
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return min(MAX_RETENTION_S, value)
    raise ValueError(f'{shown(value)} is no duration such as "5m", "1h" or a number of seconds')


SessionId = Annotated[Text, AfterValidator(_session_id)]
Duration = Annotated[Any, AfterValidator(_duration), WithJsonSchema({"type": ["string", "integer"]})]
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Hints(Body):
    """Hints for a server: those that are not declared here change nothing."""

    model_config = Body.model_config | {"extra": "ignore"}


class CacheControl(_Hints):
    """A mark of a prefix that is worth keeping, as Anthropic and Dynamo have it: here, of the whole request."""

    type: Literal["ephemeral"]
    ttl: Duration = CACHE_CONTROL_S
    """How long: "5m", "1h", or other numbers with s, m, h."""


class AgentHints(_Hints):
    """Hints of an agent about one request, as Dynamo has them."""

    priority: Priority | None = None
    """Higher ones go first among the tenant's own waiting requests."""
    strict_priority: Annotated[Any, Hint("X-Priority is the class")] = None
    osl: Annotated[Any, Hint("the router learns lengths of outputs by itself")] = None
    latency_sensitivity: Annotated[Any, Hint("an older name of Dynamo's priority")] = None
    speculative_prefill: Annotated[Any, Hint("output stays cached by itself")] = None


class SessionControl(_Hints):
    """The session of a request, as versions of Dynamo have it."""

    session_id: SessionId
    action: Literal["open", "close"] | None = None
    """"close": as session_final."""
    timeout: Annotated[int, Field(ge=0)] | None = None
    """Seconds that the KV of this request is worth keeping; 300 with "open"."""


class NvExt(_Hints):
    """Dynamo's extension of requests. Its other fields are ignored."""

    agent_hints: AgentHints | None = None
    """The priority among the tenant's own requests."""
    cache_control: CacheControl | None = None
    """How long the KV of this request is worth keeping."""
    session_control: SessionControl | None = None
    """The session, and whether it ends."""


class SessionBody(Body):
    """The session of a request, how long its KV is worth keeping, and its place among the tenant's own requests."""

    session_id: SessionId | None = None
    """The conversation or agent that the request is a part of, unique in its tenant: routed to where its KV is."""
    kv_retention_s: Annotated[int, Field(ge=0, le=MAX_RETENTION_S)] | None = None
    """Seconds that the KV of prompt and output is worth keeping past others, within a bound for each tenant. A hint."""
    session_final: bool = False
    """Nothing of this session follows: what is retained for it is released when the request has ended."""
    priority: Priority | None = None
    """As vLLM has it: lower ones go first among the tenant's own waiting requests of one class (X-Priority)."""
    prompt_cache_key: Text | None = None
    """The session where nothing else names one, if it is printable ASCII without spaces."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """"24h": as kv_retention_s of a day."""
    nvext: NvExt | None = None
    """Dynamo's extension: agent_hints.priority, cache_control and session_control count, other fields are ignored."""

    def wishes_s(self) -> Iterator[int]:
        """Yield how long the KV is worth keeping by each name but `kv_retention_s`; the longest wish counts."""
        control = self.nvext.session_control if self.nvext is not None else None
        if self.prompt_cache_retention == "24h":
            yield MAX_RETENTION_S
        if self.nvext is not None and self.nvext.cache_control is not None:
            yield self.nvext.cache_control.ttl
        if control is not None and (control.timeout is not None or control.action == "open"):
            yield min(MAX_RETENTION_S, SESSION_TIMEOUT_S if control.timeout is None else control.timeout)


NO_SESSION = SessionBody()
"""What a body says that says nothing."""

# From bodies and headers to options.


class _Named(NamedTuple):
    """Hold a session's id and the field or header that it comes from."""

    field: str
    session_id: str


def settle(options: mesh_pb2.RequestOptions, body: SessionBody, headers: Mapping[str, str]) -> None:
    """Set what body and headers say of the session, of retention and of the place among others. `options` hold what headers of
    pdmesh's own say. Raises InvalidArgument that names the field or header, also for two that contradict each other."""
    options.session_id = _session_of(options, body, headers)
    final = _final_by(body, headers)
    if final is not None and not options.session_id:
        refuse(final, "there is no session that could end; send its session_id, too")
    options.session_final = options.session_final or final is not None
    if body.kv_retention_s is not None:
        options.kv_retention_s = body.kv_retention_s
    elif not options.kv_retention_s:
        options.kv_retention_s = max(body.wishes_s(), default=0)
    hint = _hint_of(body)
    if hint is not None:
        options.priority_hint = max(-MAX_PRIORITY_HINT, min(MAX_PRIORITY_HINT, hint))


def _session_of(options: mesh_pb2.RequestOptions, body: SessionBody, headers: Mapping[str, str]) -> str:
    first: _Named | None = None
    for named in _explicit(options, body, headers):
        if first is not None and named.session_id != first.session_id:
            refuse(named.field, f"names another session than {first.field}; give one of them")
        first = first or named
    if first is not None:
        return first.session_id
    ids = (*(headers.get(name, "") for name in AGENT_HEADERS), body.prompt_cache_key or "", _cookie(headers))
    return next((text for text in ids if is_session_id(text)), "")


def _cookie(headers: Mapping[str, str]) -> str:
    return cookie_parser(headers.get("cookie", "")).get(SESSION_COOKIE, "")


def _one(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header's value; None without it. Refuses two that differ."""
    values = headers.getlist(name) if isinstance(headers, Headers) else [headers[name]] if name in headers else []
    if len(set(values)) > 1:
        refuse(name, "is there twice, with different values; send it once")
    return values[0] if values else None


def _explicit(options: mesh_pb2.RequestOptions, body: SessionBody, headers: Mapping[str, str]) -> Iterator[_Named]:
    """Yield the session by each name that says nothing else; all of them have to agree."""
    if body.session_id is not None:
        yield _Named("session_id", body.session_id)
    if body.nvext is not None and body.nvext.session_control is not None:
        yield _Named("nvext.session_control.session_id", body.nvext.session_control.session_id)
    if options.session_id:
        yield _Named(SESSION, options.session_id)
    if (text := _one(headers, DYNAMO_SESSION)) is not None:
        check_session_id(DYNAMO_SESSION, text)
        yield _Named(DYNAMO_SESSION, text)


def _final_by(body: SessionBody, headers: Mapping[str, str]) -> str | None:
    """Return the field or header that says that the session ends; None: it goes on."""
    control = body.nvext.session_control if body.nvext is not None else None
    said = ((name, _one(headers, name)) for name in (DYNAMO_FINAL, SESSION_FINAL))
    by_header = next((name for name, text in said if text is not None and truth(name, text)), None)
    final = "session_final" if body.session_final else by_header
    if control is not None and control.action == "open" and final is not None:
        refuse("nvext.session_control.action", f'"open" contradicts {final}; give one of them')
    closes = control is not None and control.action == "close"
    return "nvext.session_control.action" if final is None and closes else final


def _hint_of(body: SessionBody) -> int | None:
    """Return the place among the tenant's own requests, higher ones first; None where nothing is said."""
    theirs = body.nvext.agent_hints.priority if body.nvext is not None and body.nvext.agent_hints is not None else None
    if body.priority is None or theirs is None:
        return theirs if body.priority is None else -body.priority
    if theirs != -body.priority:
        refuse("nvext.agent_hints.priority", "contradicts priority, of which lower ones go first; give one of them")
    return theirs


# `DELETE /v1/sessions/{session_id}`: the path is pdmesh's own.


class ReleasedSession(AnswerBody):
    """What was released."""

    id: str
    """The session."""
    object: Literal["session.released"]
    num_blocks: int
    """Blocks that workers retained for it."""
    num_workers: int
    """Workers that retained some of them."""
    num_unreachable: int
    """Workers that did not answer: what they retain is released when its time is over."""


class _Handlers:
    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings

    async def release(self, request: Request) -> Response:
        """Handle DELETE: of all models, or of the one that the query names as `model`."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        options = options_of(request.headers, request_id_of(request.scope))
        session_id, model = request.path_params["session_id"], request.query_params.get("model", "")
        wanted = mesh_pb2.ReleaseSessionRequest(session_id=session_id, tenant=options.tenant, model=model)
        released = await self._frontend.release_session(wanted)
        counts = {field.name: getattr(released, field.name) for field in released.DESCRIPTOR.fields}
        return json_response({"id": session_id, "object": "session.released", **counts})


def routes(frontend: Frontend, settings: HttpSettings) -> list[Route]:
    """Return the one route."""
    handlers = _Handlers(frontend, settings)
    what = "Release what is retained for a session; ?model= names the model, else it is all of them"
    return [
        Endpoint(
            "/v1/sessions/{session_id:path}", handlers.release, what, method="DELETE", answer=ReleasedSession, has_options=True
        )
    ]
