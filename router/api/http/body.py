"""Bodies of HTTP requests, read and parsed within bounds of size, depth and time; and JSON bodies and events of responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pdmesh.runtime.errors import MeshError, as_mesh_error
from pdmesh.runtime.work_threads import WorkThreads
from pdmesh.text.exact_json import number_of
from router.api.http.errors import HttpError, answer_to
from router.api.http.fields import JsonObject
from router.auth.api_keys import KeyStore

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
Respond = Callable[[HttpError | MeshError, Request], Response]
"""Forms the response that reports an error of a request."""


@dataclass(frozen=True)
class HttpSettings:
    """Hold the limits of the gateway, and the keys that clients must present; None: no keys are required."""

    max_body_bytes: int
    keys: KeyStore | None = None


READ_TIMEOUT_S = 60.0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the complete body that a client sent. Raises HttpError, also when the client leaves in the middle."""
    _check_headers(request, max_bytes)
    return await _read(request, max_bytes)


def parse_json(body: bytes, what: str = "the body") -> JsonObject:
    """Return the JSON object in the body. Raises HttpError with status 400 that says what is wrong and where. `what`: the name of
    `body` in messages."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant, parse_float=number_of)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"{what} is not UTF-8 (at byte {error.start}); send JSON in UTF-8") from None
    except RecursionError:
        raise HttpError(400, f"{what}: the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise HttpError(400, f"{what} is not JSON: {error.msg} ({where})") from None
    except ValueError:
        raise HttpError(400, f"{what} is not JSON that can be read: it holds NaN, Infinity or a number of many digits") from None
    if not isinstance(value, dict):
        raise HttpError(400, f'{what} is not a JSON object; send one such as {{"model": ...}}')
    return value


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"content-type is {kind[:80]!r}; send application/json", param="Content-Type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "a compressed body is not supported; send it as it is", param="Content-Encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        _refuse_size(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    _refuse_size(max_bytes)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HttpError(400, "the body is not complete") from None
    return bytes(body)


def _refuse_size(max_bytes: int) -> NoReturn:
    raise HttpError(413, f"the body has more than {max_bytes} bytes (http_max_body_bytes)")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


LARGE_BODY_BYTES = 64 << 10
"""Longer bodies are parsed in a thread, one after the other, so that they do not block the streams on the event loop."""
PARSE_TIMEOUT_S = 30.0
_threads = WorkThreads("HTTP body", num_threads=1, max_waiting=64, timeout_s=PARSE_TIMEOUT_S)


async def parsed(parse: Callable[[JsonObject], T], sent: bytes) -> T:
    """Return what `parse` makes of a body. Raises HttpError, InvalidArgument; ResourceExhausted when too many large bodies
    wait."""
    if len(sent) <= LARGE_BODY_BYTES:
        return parse(parse_json(sent))
    try:
        return await _threads.run(lambda: parse(parse_json(sent)))
    except TimeoutError:
        raise HttpError(408, f"the body took more than {PARSE_TIMEOUT_S:g} s to read; send less") from None


def from_json(value: JsonObject, name: str = "") -> bytes:
    """Return one event; `name`: its kind, in APIs that name it outside the data. It is ASCII only, because some clients split
    events at Unicode's other line ends."""
    head = b"event: %b\n" % name.encode() if name else b""
    return b"%bdata: %b\n\n" % (head, _dumped(value))


def json_response(value: JsonObject, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(_dumped(value), status, headers=headers, media_type="application/json")


def error_response(error: HttpError | MeshError) -> Response:
    """Return a response with an error's status, body and headers."""
    answer = answer_to(error)
    return json_response(answer.body, answer.status, headers=dict(answer.headers))


def _dumped(value: JsonObject) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def guarded(endpoint: Endpoint, respond: Respond | None = None) -> Endpoint:
    """Wrap an endpoint so that every error becomes a response. A bug is logged, and the client learns only its id. `respond`
    forms the response of an API that has a form of its own for errors; without it, it is `error_response`."""

    def answer(error: HttpError | MeshError, request: Request) -> Response:
        return error_response(error) if respond is None else respond(error, request)

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except HttpError as error:
            return answer(error, request)
        except Exception as error:  # noqa: BLE001 - the boundary
            return answer(as_mesh_error(error), request)

    return call
