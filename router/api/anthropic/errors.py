"""Errors in Anthropic's form: a status, and {"type": "error", "error": {type, message}, "request_id"}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from pdmesh.runtime.errors import CONTEXT_OVERFLOW, InvalidArgument, MeshError
from router.api.http.body import json_response
from router.api.http.errors import HttpError, answer_to
from router.api.http.fields import JsonObject
from router.api.http.headers import request_id_of
from router.api.validation import ContextOverflow

REQUEST_ID = "request-id"
"""Header in which Anthropic's clients look for the request's id."""

OVERLOADED = 529
_OWN_LIMITS = frozenset({"rate"})
"""Reasons of refusals for which the caller's own limit is the cause, and not the load of the mesh."""
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", OVERLOADED: "overloaded_error",
}  # fmt: skip

_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""Details that tell clients how to go on, by field. Routers keep no conversations: without threads a client sends all of it."""


@dataclass(frozen=True)
class ErrorAnswer:
    """Hold status, body and headers of an error."""

    status: int
    body: JsonObject
    headers: Mapping[str, str]


def told(error: HttpError | MeshError, request_id: str) -> ErrorAnswer:
    """Return the response that reports `error`.

    429 is the caller's own limit, 529 the load of the mesh: clients wait for `Retry-After` with both, and agents that fall back
    on another model do so for 529. A refusal without a delay is final."""
    known = answer_to(error)
    status, headers = known.status, dict(known.headers)
    if isinstance(error, MeshError) and status == 429:
        if error.retry_delay_s is None:
            headers["x-should-retry"] = "false"
        elif error.reason not in _OWN_LIMITS:
            status = OVERLOADED
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    problem: JsonObject = {"type": kind, "message": _words(error)}
    if isinstance(error, InvalidArgument) and error.field in _DETAILS:
        problem["details"] = _DETAILS[error.field]
    body: JsonObject = {"type": "error", "error": problem, "request_id": request_id}
    return ErrorAnswer(status, body, {**headers, REQUEST_ID: request_id})


def error_response(error: HttpError | MeshError, request: Request) -> Response:
    """Return the response that reports an error of `request`."""
    answer = told(error, request_id_of(request.scope))
    return json_response(answer.body, answer.status, headers=dict(answer.headers))


def _words(error: HttpError | MeshError) -> str:
    """Return the message; agents look for Anthropic's own words about a context that is too short, and shorten what they send."""
    if isinstance(error, ContextOverflow):
        at_least = "at least " if error.is_lower_bound else ""
        return f"prompt is too long: {at_least}{error.num_prompt} tokens > {error.max_context - 1} maximum"
    if isinstance(error, MeshError) and error.reason == CONTEXT_OVERFLOW:
        return f"prompt is too long: {error.message}"
    return error.message
