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
from autoscaler.platform import PlatformError
from runtime.config import ConfigError

MAX_CONNECTIONS = 128
STOP_S = 1.0
RELOAD_S = 30.0
RETRY_S = 5.0
"""Between two questions to the cluster who may ask."""

logger = logging.getLogger(__name__)


class MetricsServer:
    """From `start` to `close`. `ports`: as bound, by "kubernetes" and "json"."""

    def __init__(self, settings: MetricsSettings, cluster: KubernetesSettings, host: str, model: str) -> None:
        """Raises ConfigError."""
        self._settings, self._cluster, self._host = settings, cluster, host
        self._metrics = ExternalMetrics(cluster.own_namespace(), model, settings.max_age_s)
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self._following: asyncio.Task[None] | None = None
        self._closed_port: socket.socket | None = None
        self._problem = ""
        self.ports: dict[str, int] = {}
        self.on_decision = self._metrics.on_decision

    async def start(self) -> None:
        """Raises ConfigError where the files or a port cannot be used. Where the cluster does not say who may ask, its port
        refuses connections and the question is put again and again: decisions do not wait for it."""
        if self._settings.json_port is not None:
            json_port = _bound(self._host, self._settings.json_port)
            self.ports["json"] = self._listen(self._metrics.json_app(), json_port, None, None)
        if self._settings.port is not None:
            context = self._context()
            self._closed_port = _bound(self._host, self._settings.port)
            self.ports["kubernetes"] = int(self._closed_port.getsockname()[1])
            await self._try_to_open(context)
            self._following = asyncio.create_task(self._follow(context), name="external metrics")

    async def close(self) -> None:
        """Idempotent."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._closed_port is not None:
            self._closed_port.close()
        for server, _ in self._servers:
            server.should_exit = server.force_exit = True
        for _, task in self._servers:
            await asyncio.wait({task}, timeout=STOP_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._servers.clear()

    async def _try_to_open(self, context: ssl.SSLContext) -> None:
        """The port of external metrics, if it is known who may ask. Raises ConfigError."""
        try:
            callers = await self._callers()
            context.load_verify_locations(cadata=callers.ca)
        except (PlatformError, ssl.SSLError) as error:
            if str(error) != self._problem:
                logger.warning("the port of external metrics stays closed, tried again every %g s: %s", RETRY_S, error)
            self._problem = str(error)
        else:
            listening, self._closed_port = self._closed_port, None
            assert listening is not None
            self._listen(self._metrics.kubernetes_app(), listening, context, callers)

    async def _callers(self) -> Callers:
        """Raises ConfigError, PlatformError."""
        if self._settings.client_ca:
            return Callers(_certificates(self._settings.client_ca), self._settings.client_names)
        api = open_api(self._cluster)
        try:
            return await front_proxy.read(api)
        finally:
            api.close()

    def _context(self) -> ssl.SSLContext:
        """No handshake without a certificate of a CA; which one, it does not know yet. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self._settings.cert, self._settings.key)
        except OSError as error:
            raise ConfigError("cert", f"certificate or key cannot be used: {error}", "give PEM files") from None
        return context

    def _listen(self, app: Starlette, listening: socket.socket, context: ssl.SSLContext | None, callers: Callers | None) -> int:
        listening.listen()
        protocol = type("KnownProtocol", (_Protocol,), {"callers": callers})
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", interface="asgi3", proxy_headers=False, server_header=False,
            log_config=None, log_level="warning", access_log=False, limit_concurrency=MAX_CONNECTIONS,
        )  # fmt: skip
        config.load()
        config.ssl = context
        server = _Server(config)
        self._servers.append((server, asyncio.create_task(server.serve(sockets=[listening]), name="metrics")))
        logger.info("wanted replicas on port %d", listening.getsockname()[1])
        return int(listening.getsockname()[1])

    async def _follow(self, context: ssl.SSLContext) -> None:
        """Opens the port once that can be done. Certificates are replaced while a pod runs: new handshakes show the new one."""
        stamp = _stamp(self._settings)
        while self._closed_port is not None:
            await asyncio.sleep(RETRY_S)
            await self._try_to_open(context)
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


def _certificates(path: str) -> str:
    """PEM. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        raise ConfigError("client_ca", f"{path}: {error}", "name a PEM file") from None
    return text


def _bound(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening = socket.socket(found[0][0], socket.SOCK_STREAM)  # refuses connections until it listens
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[0][4])
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
