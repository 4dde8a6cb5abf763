"""Listens for whoever asks for the wanted replicas, on the loop of the autoscaler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from autoscaler.kubernetes import front_proxy
from autoscaler.kubernetes.api import open_api
from autoscaler.kubernetes.external_metrics import ExternalMetrics
from autoscaler.kubernetes.front_proxy import Callers
from autoscaler.kubernetes.metrics_settings import MetricsSettings
from autoscaler.kubernetes.settings import KubernetesSettings
from runtime.config import ConfigError

MAX_CONNECTIONS = 128
STOP_S = 1.0
RELOAD_S = 30.0

logger = logging.getLogger(__name__)


class MetricsServer:
    """From `start` to `close`. `ports`: as bound, by "kubernetes" and "json"."""

    def __init__(self, settings: MetricsSettings, cluster: KubernetesSettings, host: str, model: str) -> None:
        """Raises ConfigError."""
        self._settings, self._cluster, self._host = settings, cluster, host
        self._metrics = ExternalMetrics(cluster.own_namespace(), model, settings.max_age_s)
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self._reload: asyncio.Task[None] | None = None
        self.ports: dict[str, int] = {}
        self.on_decision = self._metrics.on_decision

    async def start(self) -> None:
        """Raises ConfigError where the files or a port cannot be used, PlatformError where the cluster does not say who asks."""
        if self._settings.port is not None:
            callers = await self._callers()
            context = self._context(callers)
            self.ports["kubernetes"] = await self._listen(self._metrics.kubernetes_app(), self._settings.port, context, callers)
            self._reload = asyncio.create_task(self._follow(context), name="certificate")
        if self._settings.json_port is not None:
            self.ports["json"] = await self._listen(self._metrics.json_app(), self._settings.json_port, None, None)

    async def close(self) -> None:
        """Idempotent."""
        if self._reload is not None:
            self._reload.cancel()
        for server, _ in self._servers:
            server.should_exit = server.force_exit = True
        for _, task in self._servers:
            await asyncio.wait({task}, timeout=STOP_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._servers.clear()

    async def _callers(self) -> Callers:
        if self._settings.client_ca:
            try:
                ca = Path(self._settings.client_ca).read_text(encoding="utf-8")  # noqa: ASYNC240 - once, before anything runs
            except OSError as error:
                raise ConfigError("client_ca", str(error), "name a PEM file") from None
            return Callers(ca, self._settings.client_names)
        api = open_api(self._cluster)
        try:
            return await front_proxy.read(api)
        finally:
            api.close()

    def _context(self, callers: Callers) -> ssl.SSLContext:
        try:
            return callers.context(self._settings.cert, self._settings.key)
        except OSError as error:
            raise ConfigError("cert", f"certificate, key or the callers' CA cannot be used: {error}", "give PEM files") from None

    async def _listen(self, app: Starlette, port: int, context: ssl.SSLContext | None, callers: Callers | None) -> int:
        protocol = type("KnownProtocol", (_Protocol,), {"callers": callers})
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", interface="asgi3", proxy_headers=False, server_header=False,
            log_config=None, log_level="warning", access_log=False, limit_concurrency=MAX_CONNECTIONS,
        )  # fmt: skip
        config.load()
        config.ssl = context
        listening = _bound(self._host, port)
        server = _Server(config)
        self._servers.append((server, asyncio.create_task(server.serve(sockets=[listening]), name="metrics")))
        logger.info("wanted replicas on port %d", listening.getsockname()[1])
        return int(listening.getsockname()[1])

    async def _follow(self, context: ssl.SSLContext) -> None:
        """Certificates are replaced while a pod runs: new handshakes show the new one."""
        stamp = _stamp(self._settings)
        while True:
            await asyncio.sleep(RELOAD_S)
            now = _stamp(self._settings)
            if now != stamp:
                try:
                    context.load_cert_chain(self._settings.cert, self._settings.key)
                    stamp = now
                except OSError as error:
                    logger.warning("the new certificate cannot be used: %s", error)


class _Protocol(H11Protocol):
    """Ends connections of who is not known. Nobody else gets through the handshake than those of the CA."""

    callers: Callers | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        certificate: dict[str, Any] | None = transport.get_extra_info("peercert")
        if self.callers is not None and not self.callers.knows(certificate):
            logger.warning("someone who is not the API server asked for metrics: %s", (certificate or {}).get("subject"))
            transport.abort()
        super().connection_made(transport)


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Nothing."""
        yield


def _bound(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening = socket.socket(found[0][0], socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[0][4])
        listening.listen()
    except OSError as error:
        listening.close()
        raise ConfigError("port", f"cannot listen on {host} port {port}: {error.strerror or error}", "choose another") from None
    return listening


def _stamp(settings: MetricsSettings) -> list[tuple[int, int]]:
    stamps = []
    for path in (settings.cert, settings.key):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            stamps.append((found.st_mtime_ns, found.st_size))
    return stamps
