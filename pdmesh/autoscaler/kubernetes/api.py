"""Sends requests to the API server through the `kubernetes` client: plain JSON objects, bounded waits, one error type.

The client blocks, so each request runs in a thread. The client's models are not used: they would reject objects of other
versions.
"""

import asyncio
import http
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import OpenApiException

from pdmesh.autoscaler.kubernetes.objects import MANAGER
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings
from pdmesh.autoscaler.platform import PlatformError
from pdmesh.runtime.config import ConfigError

Object = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
# More threads than requests ever run at once, so that some may hang in a DNS look-up without delaying the Lease.
_MAX_THREADS = 12
_MAX_SHOWN = 300
_REMEDIES = {
    401: "the token or certificate is rejected: check --…-kubeconfig or the pod's service account",
    403: "give the account the rights in k8s/components/autoscaler/rbac.yaml",
}

logger = logging.getLogger(__name__)


class ApiError(PlatformError):
    """Raised when the API server does not answer (`status` None) or rejects a request."""

    def __init__(self, what: str, problem: str, status: int | None = None) -> None:
        remedy = f"; {_REMEDIES[status]}" if status in _REMEDIES else ""
        super().__init__(f"{what}: {problem}{remedy}")
        self.status = status


class MissingError(ApiError):
    """Raised when the object does not exist."""


class ConflictError(ApiError):
    """Raised when the object has changed since it was read, or exists already."""


_ERRORS: dict[int, type[ApiError]] = {404: MissingError, 409: ConflictError}


class Api:
    """Access one API server."""

    def __init__(self, api_client: Any, timeout_s: float) -> None:
        """Own `api_client`, an ApiClient, from here on. `timeout_s` bounds each request as a whole."""
        self._client = api_client
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "kubernetes")

    async def get(self, path: str) -> Object:
        """Return an object. All methods raise ApiError: MissingError, ConflictError or another one."""
        return await self._request("GET", path, None)

    async def create(self, path: str, body: Object) -> Object:
        """Create an object; `path` is that of the collection."""
        return await self._request("POST", path, body)

    async def patch(self, path: str, body: Object) -> Object:
        """Merge `body` into the object: fields that it does not name stay. With metadata.resourceVersion it applies only to that
        version."""
        return await self._request("PATCH", path, body)

    def close(self) -> None:
        """Close the client. Running requests end within their own bound."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    async def _request(self, method: str, path: str, body: Object | None) -> Object:
        what = f"{method} {path.rpartition('/namespaces/')[2]}"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                status, data = await loop.run_in_executor(self._threads, self._call, method, path, body)
        except TimeoutError:
            raise ApiError(what, f"the API server has not answered within {self._timeout_s:g} s") from None
        except (urllib3.exceptions.HTTPError, OpenApiException, config.ConfigException, OSError) as error:
            raise ApiError(what, f"cannot reach the API server: {_shown(error)}") from error
        return _object(what, status, data)

    def _call(self, method: str, path: str, body: Object | None) -> tuple[int, bytes]:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH if method == "PATCH" else "application/json"
        # managedFields shows this name as the manager of the fields.
        query = [] if method == "GET" else [("fieldManager", MANAGER)]
        request = self._client.param_serialize(
            method, path, query_params=query, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        answer = self._client.call_api(*request, _request_timeout=self._timeout_s)
        return answer.status, answer.read()


def open_api(settings: KubernetesSettings) -> Api:
    """Return an Api; nothing is sent yet. Raises ConfigError without a configuration to reach the API server."""
    configuration = client.Configuration()
    try:
        if settings.kubeconfig:
            path = os.path.expanduser(settings.kubeconfig)
            config.load_kube_config(path, settings.context or None, configuration)
        else:
            config.load_incluster_config(configuration)
    except (config.ConfigException, OSError) as error:
        name = "kubeconfig" if settings.kubeconfig else "KUBERNETES_SERVICE_HOST"
        remedy = "in a pod mount the account's token (automountServiceAccountToken); elsewhere give --…-kubeconfig"
        raise ConfigError(name, _shown(error), remedy) from None
    # The caller decides when to retry: a hidden retry would exceed the bound.
    configuration.retries = False
    return Api(client.ApiClient(configuration), settings.request_timeout_s)


def _object(what: str, status: int, data: bytes) -> Object:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not 200 <= status <= 299:
        raise _ERRORS.get(status, ApiError)(what, _refusal(status, found), status)
    if not isinstance(found, dict):
        raise ApiError(what, f"the answer is not from an API server: {data[:_MAX_SHOWN]!r}")
    return found


def _refusal(status: int, found: object) -> str:
    message = found.get("message") if isinstance(found, dict) else None
    name = http.HTTPStatus(status).phrase if status in http.HTTPStatus.__members__.values() else "unknown"
    return f"{status} {name}" + (f": {str(message)[:_MAX_SHOWN]}" if message else "")


def _shown(error: Exception) -> str:
    return str(error)[:_MAX_SHOWN] or type(error).__name__
