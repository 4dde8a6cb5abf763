"""One line of a batch as a request: it enters the endpoint of its protocol as an HTTP request does, with the priority `batch`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.http.connection import RECEIVED_NS
from router.api.http.fields import JsonObject
from router.api.http.headers import HEADER, PRIORITY, new_id
from router.auth.api_keys import ApiKey, KeyStore
from router.telemetry.timings import now_ns

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""What OpenAI's batches may call; those that this router has are served."""
OVERLOADED = (429, 503)
DEFAULT_RETRY_S = 1.0
_HASH = "0" * 64


@dataclass(frozen=True)
class LineAnswer:
    """Hold the response to a line. `retry_s`: the mesh was overloaded, and this is when to try again; None: it is an answer."""

    status: int
    request_id: str
    body: JsonObject
    retry_s: float | None


class BatchKeys(KeyStore):
    """Stand in for the keys of batches: a client's key was checked when it created the batch, and is not kept.

    Only endpoints that `LineRunner` calls have this store; no connection leads to them."""

    def __init__(self) -> None:
        super().__init__(_no_table)
        self._tenants: dict[str, ApiKey] = {}

    @contextmanager
    def key_of(self, tenant: str) -> Iterator[str]:
        """Yield a key of the tenant that is valid until the end of the context."""
        key = secrets.token_hex(16)
        self._tenants[key] = ApiKey(_HASH, "batch", tenant, created=0)
        try:
            yield key
        finally:
            del self._tenants[key]

    def find(self, shown: str) -> ApiKey | None:
        """Return the record of a key."""
        return self._tenants.get(shown)


async def _no_table() -> None:
    return None


class LineRunner:
    """Run lines on the endpoints of a router."""

    def __init__(self, routes: Iterable[Route], keys: BatchKeys) -> None:
        """Take the routes whose endpoints check `keys`."""
        self.keys = keys
        self._endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
            route.path: route.endpoint for route in routes if route.path in ENDPOINTS and "POST" in (route.methods or ())
        }

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Return the paths that lines may call."""
        return tuple(self._endpoints)

    async def run(self, endpoint: str, body: bytes, key: str) -> LineAnswer:
        """Return the response to one request. Cancelling ends it on the workers, too."""
        request_id = new_id()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", PRIORITY: "batch", HEADER: request_id}
        response = await self._endpoints[endpoint](Request(_scope(endpoint, headers), _receiver(body)))
        value = json.loads(bytes(response.body))
        return LineAnswer(response.status_code, request_id, value, _retry_s(response))


def _scope(path: str, headers: dict[str, str]) -> dict[str, Any]:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": raw, "client": None, "server": None, RECEIVED_NS: now_ns(),
    }  # fmt: skip


def _receiver(body: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Return what an endpoint reads its body from. After it nothing comes: this client does not leave."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return receive


def _retry_s(response: Response) -> float | None:
    if response.status_code not in OVERLOADED:
        return None
    said = response.headers.get("retry-after-ms", "")
    return int(said) / 1000 if said.isdecimal() else DEFAULT_RETRY_S
