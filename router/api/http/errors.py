"""Errors in the form that OpenAI's clients know: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import grpc

from pdmesh.runtime.errors import CONTEXT_OVERFLOW, TOO_MANY_CHOICES, DeadlineExceeded, InvalidArgument, MeshError
from router.api.http.fields import JsonObject, UnknownName
from router.api.http.types import AnswerBody
from router.api.validation import ContextOverflow

Names = Mapping[str, str]
"""Maps a field of pdmesh.v1 to the name by which the client knows it; also for paths below the field."""

UNAVAILABLE_RETRY_S = 1.0
_CODE = grpc.StatusCode
_STATUS = {
    _CODE.INVALID_ARGUMENT: 400, _CODE.OUT_OF_RANGE: 400, _CODE.FAILED_PRECONDITION: 400, _CODE.UNAUTHENTICATED: 401,
    _CODE.PERMISSION_DENIED: 403, _CODE.NOT_FOUND: 404, _CODE.ABORTED: 409, _CODE.ALREADY_EXISTS: 409,
    _CODE.RESOURCE_EXHAUSTED: 429, _CODE.CANCELLED: 499, _CODE.UNIMPLEMENTED: 501, _CODE.UNAVAILABLE: 503,
    _CODE.DEADLINE_EXCEEDED: 504,
}  # fmt: skip
_NEVER = frozenset({CONTEXT_OVERFLOW, TOO_MANY_CHOICES})
"""Reasons why a request never fits, whatever its gRPC code: clients try again after 429, and would only get the same."""
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "service_unavailable", 504: "deadline_exceeded"}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class HttpError(Exception):
    """Report an error of HTTP itself: wrong content type, wrong key, no such page."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def as_told(error: HttpError | MeshError) -> MeshError:
    """Return the error as traces and metrics report it: with a gRPC code, and without text of the caller's."""
    if isinstance(error, UnknownName):
        return InvalidArgument("body", error.message)
    if isinstance(error, MeshError):
        return error
    if error.status == HTTPStatus.REQUEST_TIMEOUT:
        return DeadlineExceeded(error.message)
    return InvalidArgument(error.param or "body", error.message)


@dataclass(frozen=True)
class ErrorAnswer:
    """Hold status, body and headers of an error."""

    status: int
    body: JsonObject
    headers: Mapping[str, str]


def answer_to(error: HttpError | MeshError) -> ErrorAnswer:
    """Return the response that reports `error`."""
    if isinstance(error, HttpError):
        body = _body(error.status, error.message, error.param, error.code)
        return ErrorAnswer(error.status, body, {})
    status = 400 if error.reason in _NEVER else _STATUS.get(error.code, 500)
    code = "model_not_found" if status == 404 and error.field == "model" else _CODES.get(status)
    code = CONTEXT_OVERFLOW if error.reason == CONTEXT_OVERFLOW else code
    return ErrorAnswer(status, _body(status, error.message, error.field, code), _headers(status, error))


def renamed(error: MeshError, names: Names) -> MeshError:
    """Return `error` with its field, and the beginning of its message, as the client knows them. The words about a context that
    is too short stand alone: clients compare their beginning."""
    field = error.field
    if field is None:
        return error
    known = [mesh for mesh in names if field == mesh or field.startswith((f"{mesh}[", f"{mesh}."))]
    longest = max(known, key=len, default="")
    param = names[longest] + field[len(longest) :] if known else field.removeprefix("sampling.")
    if isinstance(error, ContextOverflow):
        return error.told(param, "messages" if names.get("prompt") == "messages" else "prompt")
    if param == field:
        return error
    message = f"{param}: {error.message.removeprefix(f'{field}: ')}"
    return MeshError(message, code=error.code, field=param, retry_delay_s=error.retry_delay_s, reason=error.reason)


class ErrorDetails(AnswerBody):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    """The field, as the client wrote it."""
    code: str | None


class ErrorBody(AnswerBody):
    """An error."""

    error: ErrorDetails


def _body(status: int, message: str, param: str | None, code: str | None) -> JsonObject:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _headers(status: int, error: MeshError) -> dict[str, str]:
    delay_s = UNAVAILABLE_RETRY_S if error.retry_delay_s is None and status == 503 else error.retry_delay_s
    headers = {}
    if delay_s is not None:
        headers = {"retry-after": str(max(1, math.ceil(delay_s))), "retry-after-ms": str(max(1, round(delay_s * 1000)))}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 503:
        headers["connection"] = "close"  # the next try may reach another router
    if status == 504:
        headers["x-should-retry"] = "false"  # the client's own time limit: else the openai package retries by itself
    return headers
