"""Exports metrics: by a port for scrapers, by OTLP, or both.

event loop of the service    counts, and calls readers once for each scrape
thread "metrics"             HTTP, text                        (metrics_exporters.py)
thread "metrics-otlp"        OTLP every 10 s                   (metrics_otlp.py)
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdmesh.runtime.addresses import join_address, reachable_host
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.metrics import Instrument, Kind, Metrics, Reader, gauge
from pdmesh.runtime.telemetry.metrics_registry import Reading, Registry
from pdmesh.runtime.telemetry.spans import Attributes, Value

# The port that Prometheus scrapes: GET /metrics, as text or, if the request accepts it, as OpenMetrics, which has exemplars.
#
# It runs on a thread with its own event loop: a client that is slow, frequent or sends garbage costs the service nothing. A
# connection is for one request of at most MAX_REQUEST_BYTES and lives TIMEOUT_S at most; there are MAX_CONNECTIONS; a scrape
# within FRESH_S gets the same text again. It is neither encrypted nor authenticated: bind it to a network that only the
# monitoring reaches.


MAX_CONNECTIONS = 16
MAX_REQUEST_BYTES = 8192
TIMEOUT_S = 5.0
FRESH_S = 0.25
_EOF = b"# EOF\n"
_CHUNK = 8
"""Families that are formatted in a row, without yielding to the service's threads."""

logger = logging.getLogger(__name__)


class MetricsServer:
    """Serve between `start` and `stop`, which block and may be called on any thread but its own."""

    def __init__(self, host: str, port: int, look: Callable[[], list[Metric]]) -> None:
        """Create the server. `look` returns all families; it may block, and raise."""
        self.host, self.port = host, port
        self._look = look
        self._texts: dict[str, tuple[float, bytes]] = {}
        self._num_open = 0
        self._rendering = asyncio.Lock()
        self._started: Future[int] = Future()
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Start; return the URL. Raises OSError."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="metrics", daemon=True)
        self._thread.start()
        self.port = self._started.result()
        return f"http://{join_address(reachable_host(self.host), self.port)}/metrics"

    def stop(self) -> None:
        """Stop. Idempotent."""
        if self._loop is not None and self._stopping is not None and self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(TIMEOUT_S)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await asyncio.start_server(self._on_connection, self.host, self.port, limit=MAX_REQUEST_BYTES, backlog=32)
        except OSError as error:
            self._started.set_exception(error)
            return
        self._started.set_result(server.sockets[0].getsockname()[1])
        await self._stopping.wait()
        server.close()  # open connections end with this loop

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_open += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            writer.transport.abort()
        finally:
            self._num_open -= 1

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return _response("400 Bad Request", b"that is no request\n")
        request, *headers = head.decode("latin-1").split("\r\n")
        method, _, rest = request.partition(" ")
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"GET /metrics\n")
        if rest.partition(" ")[0].partition("?")[0] not in ("/metrics", "/metrics/"):
            return _response("404 Not Found", b"the metrics are at /metrics\n")
        try:
            kind, text = await self._text(_accepted(headers))
        except (TimeoutError, RuntimeError):
            return _response("503 Service Unavailable", b"the process is busy or stopping\n")
        return _response("200 OK", text, kind, with_body=method == "GET")

    async def _text(self, accepted: str) -> tuple[str, bytes]:
        """Return content type and text; renewed after FRESH_S."""
        encode, kind = choose_encoder(accepted)
        async with self._rendering:
            made_at, text = self._texts.get(kind, (float("-inf"), b""))
            if time.monotonic() - made_at >= FRESH_S:
                families = await asyncio.to_thread(self._look)
                text = await _render(families, encode)
                self._texts = {kind: (time.monotonic(), text)}
        return kind, text


class _Some(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _render(families: Sequence[Metric], encode: Callable[[Collector], bytes]) -> bytes:
    parts, is_open = list[bytes](), False
    for start in range(0, len(families), _CHUNK):
        part = encode(_Some(families[start : start + _CHUNK]))
        is_open = part.endswith(_EOF)
        parts.append(part.removesuffix(_EOF))
        await asyncio.sleep(0.0005)
    return b"".join(parts) + (_EOF if is_open else b"")


def _accepted(headers: Iterable[str]) -> str:
    pairs = (header.partition(":") for header in headers)
    return ",".join(value.strip() for name, _, value in pairs if name.strip().lower() == "accept")


def _response(status: str, body: bytes, kind: str = "text/plain; charset=utf-8", *, with_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("latin-1") + (body if with_body else b"")


INFO = gauge(
    "pdmesh.info", "Which process this is; always 1", ("service", "instance", "version", "roles", "mesh", "epoch", "pid")
)
_FROM_RESOURCE = ("service.instance.id", "service.version", "pdmesh.roles", "pdmesh.mesh", "pdmesh.epoch")
READ_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 1.0

Look = Callable[[], list[Metric]]


class Exporter(Protocol):
    """Send figures on a thread of its own."""

    def start(self, look: Look, catalogue: dict[str, Instrument]) -> None:
        """Start sending; `look` blocks for a moment."""

    def close(self, timeout_s: float) -> None:
        """Send the last figures, for at most `timeout_s` seconds."""


class LiveMetrics(Metrics):
    """Export the instruments; see `metrics.Metrics`."""

    is_on = True

    def __init__(self, service: str, resource: Attributes) -> None:
        self.registry = Registry()
        self._info = (service, *(_text(resource.get(name, "")) for name in _FROM_RESOURCE), str(os.getpid()))
        self._readers: list[Reader] = [self._read_info]
        self._failing: set[Reader] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: MetricsServer | None = None
        self._exporter: Exporter | None = None

    def add(self, instrument: Instrument, amount: float, *labels: str) -> None:
        self.registry.add(instrument, amount, labels)

    def observe(self, instrument: Instrument, value: float, *labels: str, trace: str = "") -> None:
        assert instrument.kind is Kind.HISTOGRAM
        self.registry.observe(instrument, value, labels, trace)

    def read_by(self, reader: Reader) -> None:
        self._readers.append(reader)

    def listen(self, host: str, port: int) -> None:
        """Open a port for scrapers; 0: any."""
        self._server = MetricsServer(host, port, self.look)

    def send_by(self, exporter: Exporter) -> None:
        """Send to a collector."""
        self._exporter = exporter

    async def start(self) -> str:
        self._loop = asyncio.get_running_loop()
        if self._exporter is not None:
            self._exporter.start(self.look, self.registry.catalogue)
        if self._server is None:
            return ""
        try:
            return await asyncio.to_thread(self._server.start)
        except OSError as error:
            problem = f"cannot listen on {join_address(self._server.host, self._server.port)}: {error.strerror or error}"
            raise ConfigError("--metrics-port", problem, "give another one, or 0 for any that is free") from error

    async def stop(self) -> None:
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close, STOP_TIMEOUT_S)
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        self._loop = None

    def look(self) -> list[Metric]:
        """Return all current families. Blocks until the service's event loop has answered; on other threads only. Raises
        TimeoutError, RuntimeError once it has stopped."""
        if self._loop is None:
            raise RuntimeError("it has stopped")
        asked: Future[list[Metric]] = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            read = asked.result(READ_TIMEOUT_S)
        except TimeoutError:
            asked.cancel()
            raise
        return [*self.registry.families(), *read]

    async def _read(self) -> list[Metric]:
        reading = Reading(self.registry)
        for reader in self._readers:
            try:
                reader(reading)
            except Exception:  # a bug in one reader must not remove the others' figures
                if reader not in self._failing:
                    self._failing.add(reader)
                    logger.exception("some metrics cannot be read")
        return list(reading.families())

    def _read_info(self, readings: object) -> None:
        assert isinstance(readings, Reading)
        readings.put(INFO, 1, *self._info)


def _text(value: Value) -> str:
    return str(value) if isinstance(value, str | bool | int | float) else ",".join(value)
