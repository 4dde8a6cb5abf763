"""As much of the Kubernetes API as the agent needs: calls as JSON, and a copy of a collection that follows the server's."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

Object = dict[str, Any]
Key = tuple[str, str]
MERGE_PATCH = "application/merge-patch+json"
_RETRY_S = 0.5
_TIMEOUT_S = 10.0
_WATCH_S = 120


class ApiError(RuntimeError):
    """The server said no; `status` is HTTP's, 0 when there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """One connection pool to one server, with one token."""

    def __init__(self, url: str, token: str, ca: str) -> None:
        context = ssl.create_default_context(cafile=ca)
        self._http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, verify=context, timeout=_TIMEOUT_S
        )

    async def close(self) -> None:
        """Ends all connections."""
        await self._http.aclose()

    async def call(self, method: str, path: str, body: object = None, *, kind: str = "application/json") -> Object:
        """One call. Raises ApiError."""
        content = None if body is None else json.dumps(body).encode()
        try:
            answer = await self._http.request(method, path, content=content, headers={"Content-Type": kind})
        except httpx.HTTPError as error:
            raise ApiError(0, f"{method} {path}: {type(error).__name__} {error}") from error
        if answer.is_error:
            raise ApiError(answer.status_code, f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        result: Object = answer.json()
        return result

    async def watch(self, path: str, version: str) -> AsyncIterator[Object]:
        """Events after a version, until the server ends the stream. Raises ApiError."""
        parameters = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        timeout = httpx.Timeout(_TIMEOUT_S, read=_WATCH_S + _TIMEOUT_S)
        try:
            async with self._http.stream("GET", path, params=parameters, timeout=timeout) as answer:
                if answer.is_error:
                    raise ApiError(answer.status_code, f"watch {path}: {answer.status_code}")
                async for line in answer.aiter_lines():
                    yield json.loads(line)
        except (httpx.HTTPError, ValueError) as error:
            raise ApiError(0, f"watch {path}: {type(error).__name__} {error}") from error


class Mirror:
    """A copy of a collection. While the server is away it stays as it was."""

    def __init__(self, api: Api, path: str, on_change: Callable[[], None], *, where: Callable[[Object], bool] = bool) -> None:
        """`on_change` is called after each change; `where` chooses objects."""
        self._api, self._path = api, path
        self._on_change, self._where = on_change, where
        self.objects: dict[Key, Object] = {}

    async def run(self) -> None:
        """Follows until cancelled."""
        while True:
            try:
                await self._follow(await self._list())
            except ApiError:
                await asyncio.sleep(_RETRY_S)

    async def _list(self) -> str:
        answer = await self._api.call("GET", self._path)
        self.objects = {key_of(item): item for item in answer["items"] if self._where(item)}
        self._on_change()
        return str(answer["metadata"]["resourceVersion"])

    async def _follow(self, version: str) -> None:
        """Raises ApiError when the stream breaks or the version is too old."""
        while True:
            async for event in self._api.watch(self._path, version):
                if event["type"] == "ERROR":
                    raise ApiError(int(event["object"].get("code", 0)), str(event["object"].get("message")))
                version = event["object"]["metadata"]["resourceVersion"]
                self._apply(event)

    def _apply(self, event: Object) -> None:
        item = event["object"]
        if event["type"] == "DELETED" or not self._where(item):
            self.objects.pop(key_of(item), None)
        else:
            self.objects[key_of(item)] = item
        self._on_change()


def key_of(item: Object) -> Key:
    """Namespace and name."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
