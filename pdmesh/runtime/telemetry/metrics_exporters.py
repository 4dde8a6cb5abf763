"""Metrics that somebody sees: by a port for scrapers, by OTLP, or both.

event loop of the service    counts, and answers readers once for each look
thread "metrics"             HTTP, text                        (metrics_server.py)
thread "metrics-otlp"        OTLP every 10 s                   (metrics_otlp.py)
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from prometheus_client.metrics_core import Metric

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.metrics import Instrument, Kind, Metrics, Reader, gauge
from pdmesh.runtime.telemetry.metrics_registry import Reading, Registry
from pdmesh.runtime.telemetry.metrics_server import MetricsServer
from pdmesh.runtime.telemetry.spans import Attributes, Value

INFO = gauge(
    "pdmesh.info", "Which process this is; always 1", ("service", "instance", "version", "roles", "mesh", "epoch", "pid")
)
_FROM_RESOURCE = ("service.instance.id", "service.version", "pdmesh.roles", "pdmesh.mesh", "pdmesh.epoch")
READ_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)
Look = Callable[[], list[Metric]]


class Exporter(Protocol):
    """Sends figures on a thread of its own."""

    def start(self, look: Look, catalogue: dict[str, Instrument]) -> None:
        """From now on; `look` blocks for a moment."""

    def close(self, timeout_s: float) -> None:
        """Sends the last ones, for at most so long."""


class LiveMetrics(Metrics):
    """See `metrics.Metrics`."""

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
        """There is to be a port for scrapers; 0: any."""
        self._server = MetricsServer(host, port, self.look)

    def send_by(self, exporter: Exporter) -> None:
        """There is a collector."""
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
            problem = f"cannot listen on {self._server.host}:{self._server.port}: {error.strerror or error}"
            raise ConfigError("--metrics-port", problem, "give another one, or 0 for any that is free") from error

    async def stop(self) -> None:
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close, STOP_TIMEOUT_S)
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        self._loop = None

    def look(self) -> list[Metric]:
        """All families as of now. Blocks until the service's event loop has answered; on other threads only. Raises
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
            except Exception:  # a bug in one reader must not take the others' figures away
                if reader not in self._failing:
                    self._failing.add(reader)
                    logger.exception("some metrics cannot be read")
        return list(reading.families())

    def _read_info(self, readings: object) -> None:
        assert isinstance(readings, Reading)
        readings.put(INFO, 1, *self._info)


def _text(value: Value) -> str:
    return str(value) if isinstance(value, str | bool | int | float) else ",".join(value)
