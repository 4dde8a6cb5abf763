"""What a leader leaves for the next one, in a ConfigMap. Who leads no more cannot overwrite what came after."""

import json
import logging
from collections.abc import Callable

from pdmesh.autoscaler.kubernetes.api import Api, ApiError, ConflictError, MissingError, Object
from pdmesh.autoscaler.platform import PlatformError

MAX_BYTES = 400_000
"""Of one value; etcd takes a megabyte and a half for a whole object."""

logger = logging.getLogger(__name__)


class StateStore:
    """JSON values by key. `leads` is asked before anything is written."""

    def __init__(self, api: Api, namespace: str, name: str, leads: Callable[[], bool]) -> None:
        self._api = api
        self._maps = f"/api/v1/namespaces/{namespace}/configmaps"
        self._name = name
        self._leads = leads
        self._version: str | None = None

    async def load(self, key: str) -> object:
        """None where nothing was saved, or what was cannot be read. Raises ApiError."""
        try:
            found = await self._api.get(f"{self._maps}/{self._name}")
        except MissingError:
            self._version = None
            return None
        self._version = _version(found)
        try:
            value: object = json.loads((found.get("data") or {}).get(key, "null"))
            json.dumps(value, allow_nan=False)  # Python reads infinities, which nothing here reckons with
        except (ValueError, RecursionError) as error:
            logger.warning("ConfigMap %s: %s cannot be read (%s): begun anew", self._name, key, error)
            return None
        return value

    async def save(self, key: str, value: object) -> None:
        """Raises PlatformError."""
        text = self._text(key, value)
        try:
            await self._write({key: text})
        except (ConflictError, MissingError):  # somebody has edited it or taken it away; or another one leads by now
            await self._read_version()
            await self._write({key: text})

    async def _write(self, data: dict[str, str]) -> None:
        if not self._leads():
            raise PlatformError(f"ConfigMap {self._name}: not written, as this process does not lead any more")
        if self._version is None:
            self._version = _version(await self._api.create(self._maps, self._body(data)))
        else:
            self._version = _version(await self._api.patch(f"{self._maps}/{self._name}", self._body(data)))

    async def _read_version(self) -> None:
        try:
            self._version = _version(await self._api.get(f"{self._maps}/{self._name}"))
        except MissingError:
            self._version = None

    def _body(self, data: dict[str, str]) -> Object:
        metadata: Object = {"name": self._name, "labels": {"app.kubernetes.io/part-of": "pdmesh"}}
        if self._version is not None:
            metadata["resourceVersion"] = self._version
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}

    def _text(self, key: str, value: object) -> str:
        try:
            text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise ApiError(f"ConfigMap {self._name}", f"{key} cannot be written as JSON: {error}") from error
        if len(text) > MAX_BYTES:
            raise ApiError(f"ConfigMap {self._name}", f"{key} has {len(text)} bytes, more than {MAX_BYTES}: it is not saved")
        return text


def _version(found: Object) -> str:
    return str(found["metadata"]["resourceVersion"])
