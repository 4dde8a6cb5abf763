"""Where a picker's knowledge comes from: the pods of an InferencePool, and the metrics of each endpoint.

The metrics of each endpoint are read by a task of its own, at a time of its own within the period. The pods are listed again and
again, from the API server's cache: a pod that ends is found within a period, and the gateway has the fallbacks meanwhile. An API
server that does not answer changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import h11

from pdmesh.runtime.addresses import join_address, split_address
from pdmesh.runtime.config import ConfigError
from router.endpoint_picker.endpoints import Endpoints
from router.endpoint_picker.server_metrics import read_metrics

MAX_ANSWER_BYTES = 8 << 20
_GOLDEN = 0.618
logger = logging.getLogger(__name__)


class MetricsReader:
    """Keep `Endpoints` up to date. `changed` is called after each reading, and when an endpoint is not ready any more."""

    def __init__(
        self, endpoints: Endpoints, *, path: str, period_s: float, timeout_s: float, changed: Callable[[], None]
    ) -> None:
        self._endpoints, self._path, self._changed = endpoints, path, changed
        self._period_s, self._timeout_s = period_s, timeout_s
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._num_started = 0

    def follow(self) -> None:
        """Begin with endpoints that are new, and end with those that are gone."""
        keys = {endpoint.key for endpoint in self._endpoints.all()}
        for key in set(self._tasks) - keys:
            self._tasks.pop(key).cancel()
        for key in keys - set(self._tasks):
            self._num_started += 1
            delay_s = self._num_started * _GOLDEN % 1 * self._period_s
            self._tasks[key] = asyncio.create_task(self._read_forever(key[0], delay_s), name=f"metrics of {key[0]}")
        self._changed()

    async def stop(self) -> None:
        """End."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_forever(self, address: str, delay_s: float) -> None:
        if not self._path:
            self._endpoints.read(address, None, 0.0, time.monotonic())
            self._changed()
            return
        connection = KeptConnection(address)
        try:
            await self._read(connection)  # at once: until then it gets no requests
            await asyncio.sleep(delay_s)
            while True:
                await self._read(connection)
                await asyncio.sleep(self._period_s)
        finally:
            connection.close()

    async def _read(self, connection: KeptConnection) -> None:
        began, address = time.monotonic(), connection.address
        try:
            async with asyncio.timeout(self._timeout_s):
                status, body = await connection.get(self._path)
        except (OSError, TimeoutError, ValueError, h11.RemoteProtocolError) as error:
            self._note_failure(address, str(error) or type(error).__name__)
            return
        if status == 503:
            self._endpoints.left(address)
            self._changed()
            return
        if status not in (200, 404):
            self._note_failure(address, f"HTTP {status}")
            return
        load = read_metrics(body.decode("utf-8", "replace")) if status == 200 else None
        self._endpoints.read(address, load, began, time.monotonic())
        self._changed()

    def _note_failure(self, address: str, why: str) -> None:
        if self._endpoints.failed(address):
            logger.warning("%s gets no requests: its metrics cannot be had (%s)", address, why)
            self._changed()


class KeptConnection:
    """Ask one server again and again over HTTP/1.1, on a connection that stays open for as long as the server keeps it: a new one
    for each reading would cost more than the reading."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._http = h11.Connection(h11.CLIENT)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET. Raises OSError, RemoteProtocolError of h11 for what is not HTTP/1 or ends early,
        ValueError for what is too large."""
        was_kept = self._streams is not None
        try:
            return await self._ask(path)
        except (OSError, h11.RemoteProtocolError):
            if not was_kept:
                raise
            return await self._ask(path)  # the server had closed it meanwhile, as servers do after some seconds

    def close(self) -> None:
        """Close it. The next `get` opens another. Idempotent."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, path: str) -> tuple[int, bytes]:
        is_whole = False
        try:
            found = await self._exchange(path)
            is_whole = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        finally:
            if is_whole:
                self._http.start_next_cycle()
            else:
                self.close()
        return found

    async def _exchange(self, path: str) -> tuple[int, bytes]:
        if self._streams is None:
            self._http = h11.Connection(h11.CLIENT)
            self._streams = await asyncio.open_connection(*split_address(self.address))
        (reader, writer), http = self._streams, self._http
        writer.write(
            http.send(h11.Request(method="GET", target=path, headers=[("host", self.address), ("accept", "text/plain")]))
        )
        http.send(h11.EndOfMessage())
        status, body = 0, bytearray()
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
        return status, bytes(body)


async def get(address: str, path: str) -> tuple[int, bytes]:
    """Return status and body of one GET. Raises as `KeptConnection.get` does."""
    connection = KeptConnection(address)
    try:
        return await connection.get(path)
    finally:
        connection.close()


# The endpoints of an InferencePool: ready pods that its selector finds, each with the pool's ports.

GROUP, VERSION, PLURAL = "inference.networking.k8s.io", "v1", "inferencepools"
TIMEOUT_S = 5.0


class PoolApi:
    """Ask the API server, with the account of this pod, or of a kubeconfig outside of a cluster. Blocking."""

    def __init__(self, namespace: str, name: str) -> None:
        """Raises ConfigError without an account, or without the library."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise ConfigError("--pool", "needs the library kubernetes", "pip install pdmesh[autoscaler]") from None
        try:
            config.load_incluster_config()
        except config.ConfigException:
            try:
                config.load_kube_config()
            except config.ConfigException as error:
                raise ConfigError("--pool", f"there is no account for an API server: {error}", "run it in a cluster") from None
        self._namespace, self._name = namespace, name
        self._pools, self._core = client.CustomObjectsApi(), client.CoreV1Api()

    def endpoints(self) -> list[str]:
        """Return the addresses of the pool's ready pods. Raises ApiException and what urllib3 raises, ValueError for a pool that
        cannot be read."""
        pool = self._pools.get_namespaced_custom_object(
            GROUP, VERSION, self._namespace, PLURAL, self._name, _request_timeout=TIMEOUT_S
        )
        selector, ports = selector_of(pool), ports_of(pool)
        pods = self._core.list_namespaced_pod(
            self._namespace, label_selector=selector, resource_version="0", _request_timeout=TIMEOUT_S
        )
        return [join_address(pod.status.pod_ip, port) for pod in pods.items if is_ready(pod) for port in ports]


def selector_of(pool: Mapping[str, Any]) -> str:
    """Return the selector of an InferencePool as the API takes it. Raises ValueError."""
    labels = pool.get("spec", {}).get("selector", {}).get("matchLabels", {})
    if not labels or not isinstance(labels, dict):
        raise ValueError("spec.selector.matchLabels of the InferencePool is empty")
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def ports_of(pool: Mapping[str, Any]) -> list[int]:
    """Return the ports of an InferencePool. Raises ValueError."""
    ports = [each.get("number") for each in pool.get("spec", {}).get("targetPorts", [])]
    if not ports or not all(isinstance(port, int) and 0 < port < 65536 for port in ports):
        raise ValueError("spec.targetPorts of the InferencePool has no numbers of ports")
    return ports


def is_ready(pod: Any) -> bool:
    """Return whether a pod takes requests: it has an address, is ready, and does not end."""
    if pod.metadata.deletion_timestamp is not None or not pod.status or not pod.status.pod_ip:
        return False
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())


class PoolFollower:
    """Call `found` with the pool's addresses whenever they change."""

    def __init__(self, list_endpoints: Callable[[], Iterable[str]], found: Callable[[list[str]], None], period_s: float) -> None:
        self._list, self._found, self._period_s = list_endpoints, found, period_s
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._follow(), name="inference pool")

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        known: list[str] | None = None
        while True:
            try:
                listed = sorted(await asyncio.to_thread(lambda: list(self._list())))
            except Exception as error:  # noqa: BLE001 - the library raises urllib3's errors and its own, and this must go on
                if not self._is_failing:
                    logger.warning("the endpoints of the pool stay as they are, the API server said: %s", str(error)[:300])
                self._is_failing = True
            else:
                self._is_failing = False
                if listed != known:
                    known = listed
                    logger.info("the pool has %d endpoints", len(listed))
                    self._found(listed)
            await asyncio.sleep(self._period_s)
