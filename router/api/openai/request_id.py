"""Every answer says which request it is of: the client's own X-Request-Id where it is one, else one that is made here."""

from __future__ import annotations

import re
import secrets
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
_KEY = "pdmesh.request_id"
_VALID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_id() -> str:
    """Of a request that has none."""
    return secrets.token_hex(12)


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """The request's id, the same whenever it is asked for."""
    if _KEY not in scope:
        given = Headers(scope=scope).get(HEADER, "")
        scope[_KEY] = given if _VALID.fullmatch(given) else new_id()
    return str(scope[_KEY])


class WithRequestId:
    """An application whose answers all have the header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of HTTP only."""
        name = HEADER.lower().encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [header for header in message["headers"] if header[0].lower() != name]
                message = {**message, "headers": [*others, (name, request_id_of(scope).encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)
