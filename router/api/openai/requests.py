"""The body of a request: bytes from a client to one JSON object, within bounds of size, depth and time."""

from __future__ import annotations

import asyncio
import json
from typing import NoReturn

from starlette.requests import ClientDisconnect, Request

from router.api.openai.errors import HttpError
from router.api.openai.fields import JsonObject

READ_TIMEOUT_S = 60.0


async def read(request: Request, max_bytes: int) -> bytes:
    """What a client has sent, complete. Raises HttpError, also when the client leaves in the middle."""
    _check_headers(request, max_bytes)
    return await _read(request, max_bytes)


def parse(body: bytes) -> JsonObject:
    """The object in it. Raises HttpError with status 400 that says what is wrong where."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8 (at byte {error.start}); send JSON in UTF-8") from None
    except RecursionError:
        raise HttpError(400, "the body's JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise HttpError(400, f"the body is not JSON: {error.msg} ({where})") from None
    except ValueError:
        raise HttpError(400, "the body is not JSON that can be read: it holds NaN, Infinity or a number of many digits") from None
    if not isinstance(value, dict):
        raise HttpError(400, 'the body is not a JSON object; send one such as {"model": ...}')
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
