"""Headers of HTTP requests: the request's id, which every response repeats, and options: tenant, priority, mode, time limit."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api import frontend
from router.api.validation import refuse

# Every response names its request: by the client's own X-Request-Id where that is valid, else by an id that is made here.

HEADER = "X-Request-Id"
_KEY = "pdmesh.request_id"
_VALID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_id() -> str:
    """Return an id for a request that has none."""
    return secrets.token_hex(12)


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """Return the request's id; the same on every call."""
    if _KEY not in scope:
        given = Headers(scope=scope).get(HEADER, "")
        scope[_KEY] = given if _VALID.fullmatch(given) else new_id()
    return str(scope[_KEY])


class WithRequestId:
    """Wrap an application so that all its responses have the header X-Request-Id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one call; only HTTP responses get the header."""
        name = HEADER.lower().encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [header for header in message["headers"] if header[0].lower() != name]
                message = {**message, "headers": [*others, (name, request_id_of(scope).encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)


# API keys: in the header that HTTP has for them, or in the one that Anthropic's clients send.

API_KEY = "X-Api-Key"


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """Return the credentials of a request in the form of `Authorization`; None without any. A bearer's go before `X-Api-Key`."""
    sent, key = headers.get("authorization"), headers.get(API_KEY)
    is_bearer = sent is not None and sent.partition(" ")[0].lower() == "bearer"
    return sent if key is None or is_bearer else f"Bearer {key}"


# Request options in HTTP headers: tenant, priority, mode, time limit.

REQUEST_ID, TENANT, PRIORITY, MODE, TIMEOUT = HEADER, "X-Tenant", "X-Priority", "X-Prefill-Mode", "X-Request-Timeout-Ms"
MAX_TIMEOUT_MS = 10**9
HEADER_NAMES = {
    "options.request_id": REQUEST_ID, "options.tenant": TENANT, "options.cache_salt": "cache_salt",
    "options.session_id": "session_id", "options.session_final": "session_final",
    "options.kv_retention_s": "kv_retention_s", "options.priority_hint": "priority",
}  # fmt: skip

DYNAMO_SESSION, DYNAMO_FINAL = "X-Dynamo-Session-ID", "X-Dynamo-Session-Final"
AGENT_HEADERS = (
    "x-claude-code-agent-id",  # of a subagent; the session id is that of the agent that started it
    "x-claude-code-session-id",
    "session-id",  # Codex
    "session_id",  # Codex, earlier versions
    "x-session-id",  # OpenCode, llm-d
    "x-session-affinity",  # OpenCode
    "thread-id",  # Codex
)
"""Headers of coding agents; the first that is there counts. What cannot name a session is passed over: other programs send some
of these names, too."""

# What the description of an endpoint says of its headers: those that count there.

TENANT_HEADERS = {
    TENANT: "The tenant; prefix caches are shared within one. Where there are keys, it is that of the key.",
    frontend.TENANT: f"As {TENANT}, which goes before it.",
}
TIME_HEADERS = {TIMEOUT: "The deadline in milliseconds."}
_QUEUE_HEADERS = {
    PRIORITY: "The class: interactive, standard or batch.",
    frontend.PRIORITY: f"As {PRIORITY}, which goes before it.",
    frontend.PRIORITY_HINT: "The place among the tenant's own waiting requests, from -1000 to 1000: higher ones go first.",
    frontend.SLO_TTFT: "The objective for the time to the first token, in milliseconds.",
    frontend.SLO_TPOT: "The objective for the time between two tokens, in milliseconds.",
}
_SESSION_HEADERS = {
    frontend.SESSION: "The session of the request, as session_id.",
    frontend.RETENTION: "Seconds that the KV of the request is worth keeping, as kv_retention_s.",
    frontend.SESSION_FINAL: "true: nothing of the session follows, as session_final.",
}
PROMPT_HEADERS = {**TENANT_HEADERS, **TIME_HEADERS, **_QUEUE_HEADERS, **_SESSION_HEADERS}
"""Headers of requests whose prompts workers compute."""
GENERATION_HEADERS = {
    **PROMPT_HEADERS,
    DYNAMO_SESSION: "The session, as Dynamo names it.",
    DYNAMO_FINAL: "true: nothing of the session follows, as Dynamo says it.",
    **dict.fromkeys(AGENT_HEADERS, "The session, as coding agents name it; it counts where nothing else names one."),
    MODE: "local or remote: where the prompt is computed, for tests.",
}
"""Headers of requests whose answers are generated."""

_PRIORITIES = {
    "": common_pb2.PRIORITY_UNSPECIFIED,
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "standard": common_pb2.PRIORITY_STANDARD,
    "batch": common_pb2.PRIORITY_BATCH,
}
_MODES = {
    "": mesh_pb2.PREFILL_MODE_UNSPECIFIED,
    "local": mesh_pb2.PREFILL_MODE_LOCAL,
    "remote": mesh_pb2.PREFILL_MODE_REMOTE,
}
_DIGITS = re.compile(r"[0-9]{1,10}")


def options_of(headers: Mapping[str, str], request_id: str) -> mesh_pb2.RequestOptions:
    """Return the options that headers set. `request_id`: see `request_id_of`. Raises InvalidArgument that names the header."""
    said = mesh_pb2.RequestOptions(
        request_id=request_id,
        tenant=headers.get(TENANT, ""),
        priority=_PRIORITIES[_one_of(headers, PRIORITY, _PRIORITIES)],
        mode=_MODES[_one_of(headers, MODE, _MODES)],
    )
    frontend.fill_options(said, headers.items())
    return said


def requested_time_left_s(headers: Mapping[str, str]) -> float | None:
    """Return how long the client waits from now on; None without a limit. Raises InvalidArgument."""
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= MAX_TIMEOUT_MS:
        refuse(TIMEOUT, f"{text[:40]!r} is not a number of milliseconds from 1 to {MAX_TIMEOUT_MS}")
    return int(text) / 1000


def _one_of(headers: Mapping[str, str], name: str, known: Mapping[str, object]) -> str:
    value = headers.get(name, "").lower()
    if value not in known:
        refuse(name, f"{value[:40]!r} is none of {', '.join(filter(None, known))}")
    return value
