"""Serves the wanted replicas over HTTPS (API server) and HTTP (KEDA) on the autoscaler's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdmesh.autoscaler.kubernetes.api import Api, open_api
from pdmesh.autoscaler.kubernetes.external_metrics import ExternalMetrics
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings, MetricsSettings
from pdmesh.autoscaler.platform import PlatformError
from pdmesh.runtime.addresses import bare_host
from pdmesh.runtime.config import ConfigError

# Authentication of external metrics: only the API server may ask, with a client certificate of the front proxy's CA.
#
# The ConfigMap extension-apiserver-authentication in kube-system names that CA. The API server has already authorized the user;
# there is no second check here.


CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"


@dataclass(frozen=True)
class Callers:
    """Describe the accepted clients. `ca`: PEM. `names`: accepted common names; empty: any that the CA has signed."""

    ca: str
    names: tuple[str, ...] = ()

    def knows(self, certificate: dict[str, Any] | None) -> bool:
        """Return whether the certificate, in the form of `SSLSocket.getpeercert`, is accepted. None: there is none."""
        if not certificate:
            return False
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        return not self.names or any(name in self.names for name in names)


async def read_front_proxy(api: Api) -> Callers:
    """Read the front proxy's CA from the cluster. Raises PlatformError."""
    data = (await api.get(CONFIG_MAP)).get("data") or {}
    ca = data.get("requestheader-client-ca-file")
    if not ca:
        raise PlatformError("the API server has no CA for extensions (--requestheader-client-ca-file); name one: --…-client-ca")
    try:
        names = json.loads(data.get("requestheader-allowed-names") or "[]")
    except ValueError:
        names = None
    if not isinstance(names, list):
        raise PlatformError(
            "requestheader-allowed-names in extension-apiserver-authentication is no list; name a CA: --…-client-ca"
        )
    return Callers(ca, tuple(str(name) for name in names))


MAX_CONNECTIONS = 128
STOP_S = 1.0
RELOAD_S = 30.0
"""Seconds between two checks of the accepted clients and of the certificate: both are replaced while a pod runs."""
RETRY_S = 5.0
"""Seconds between two checks while the accepted clients are unknown."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Trust:
    """Hold what the port of external metrics was opened with: the accepted clients and our own certificate files."""

    callers: Callers
    files: tuple[tuple[int, int], ...]


class MetricsServer:
    """Serve from `start` to `close`. `ports`: the bound ports, by "kubernetes" and "json"."""

    def __init__(self, settings: MetricsSettings, cluster: KubernetesSettings, host: str, model: str) -> None:
        """Create the server. Raises ConfigError."""
        self._settings, self._cluster, self._host = settings, cluster, host
        self._metrics = ExternalMetrics(cluster.own_namespace(), model, settings.max_age_s)
        self._json: _Running | None = None
        self._kubernetes: _Running | None = None
        self._port: socket.socket | None = None  # of external metrics; servers listen on copies of it
        self._trust: _Trust | None = None
        self._following: asyncio.Task[None] | None = None
        self._problem = ""
        self.ports: dict[str, int] = {}
        self.on_decision = self._metrics.on_decision

    async def start(self) -> None:
        """Start serving. Raises ConfigError if the files or a port cannot be used. While the cluster does not name the accepted
        clients, the port refuses connections and the question is retried: decisions do not wait for it."""
        if self._settings.json_port is not None:
            json_port = _bound(self._host, self._settings.json_port)
            self.ports["json"] = int(json_port.getsockname()[1])
            self._json = _Running(self._metrics.json_app(), json_port)
        if self._settings.port is not None:
            _context(self._settings)
            self._port = _bound(self._host, self._settings.port)
            self.ports["kubernetes"] = int(self._port.getsockname()[1])
            await self._renew()
            self._following = asyncio.create_task(self._follow(), name="external metrics")

    async def close(self) -> None:
        """Close the servers. Idempotent."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._port is not None:
            self._port.close()
        for running in (self._json, self._kubernetes):
            if running is not None:
                await running.end(force=True)
        self._json = self._kubernetes = None

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S if self._trust is None else RELOAD_S)
            try:
                await self._renew()
            except (ConfigError, OSError) as error:
                self._warn(error)

    async def _renew(self) -> None:
        """Open the port once the accepted clients are known, and reopen it when they or our certificate change: a serving context
        cannot drop a CA that it trusts. Raises ConfigError."""
        try:
            trust = _Trust(await self._callers(), _versions(self._settings))
            if trust != self._trust:
                await self._open(trust, _context(self._settings, trust.callers))
        except (PlatformError, ssl.SSLError) as error:
            self._warn(error)
        else:
            self._problem = ""

    async def _open(self, trust: _Trust, context: ssl.SSLContext) -> None:
        """Replace the former server, whose connections end. Clients that connect in between wait in the port's queue."""
        assert self._port is not None
        if self._kubernetes is not None:
            logger.info("the port of external metrics is reopened: the accepted clients or our certificate have changed")
            await self._kubernetes.end()
        self._kubernetes = _Running(self._metrics.kubernetes_app(), self._port.dup(), context, trust.callers)
        self._trust = trust

    def _warn(self, problem: Exception) -> None:
        """Log the problem once."""
        if str(problem) != self._problem:
            state, period_s = ("stays closed", RETRY_S) if self._trust is None else ("stays as it was opened", RELOAD_S)
            logger.warning("the port of external metrics %s, tried again every %g s: %s", state, period_s, problem)
        self._problem = str(problem)

    async def _callers(self) -> Callers:
        """Return the accepted clients. Raises ConfigError, PlatformError."""
        if self._settings.client_ca:
            return Callers(_certificates(self._settings.client_ca), self._settings.client_names)
        api = open_api(self._cluster)
        try:
            return await read_front_proxy(api)
        finally:
            api.close()


class _Running:
    """Run a server on a socket, which it closes at its end. `context` None: no TLS; `callers` None: any client may ask."""

    _server: _Server

    def __init__(
        self, app: Starlette, listening: socket.socket, context: ssl.SSLContext | None = None, callers: Callers | None = None
    ) -> None:
        listening.listen()
        protocol = type("KnownProtocol", (_Protocol,), {"callers": callers, "ends": lambda _: self._server.should_exit})
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", interface="asgi3", proxy_headers=False, server_header=False,
            log_config=None, log_level="warning", access_log=False, limit_concurrency=MAX_CONNECTIONS,
        )  # fmt: skip
        config.load()
        config.ssl = context
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="metrics")
        logger.info("wanted replicas on port %d", listening.getsockname()[1])

    async def end(self, *, force: bool = False) -> None:
        """End the server. Running answers finish within a moment, unless `force`."""
        self._server.should_exit, self._server.force_exit = True, force
        await asyncio.wait({self._task}, timeout=STOP_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class _Protocol(H11Protocol):
    """Close connections of clients that are not accepted. The handshake admits only certificates of the CA."""

    callers: Callers | None = None

    def ends(self) -> bool:
        """Return whether the server is ending: a handshake that it began may finish only now, by a CA that is no longer
        trusted."""
        return False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        certificate: dict[str, Any] | None = transport.get_extra_info("peercert")
        if self.callers is not None and not self.callers.knows(certificate):
            logger.warning("a client other than the API server asked for metrics: %s", (certificate or {}).get("subject"))
            transport.abort()
        elif self.ends():
            transport.abort()
        super().connection_made(transport)


class _Server(uvicorn.Server):
    """Leave signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture nothing."""
        yield


def _certificates(path: str) -> str:
    """Return the PEM text. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        raise ConfigError("client_ca", f"{path}: {error}", "name a PEM file") from None
    return text


def _bound(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening = socket.socket(found[0][0], socket.SOCK_STREAM)  # refuses connections until it listens
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[0][4])
    except OSError as error:
        listening.close()
        raise ConfigError("port", f"cannot listen on {host} port {port}: {error.strerror or error}", "choose another") from None
    return listening


def _context(settings: MetricsSettings, callers: Callers | None = None) -> ssl.SSLContext:
    """Return a context that requires a certificate of the CA. Raises ConfigError for our own files, SSLError for that CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(settings.cert, settings.key)
    except OSError as error:
        raise ConfigError("cert", f"certificate or key cannot be used: {error}", "give PEM files") from None
    if callers is not None:
        context.load_verify_locations(cadata=callers.ca)
    return context


def _versions(settings: MetricsSettings) -> tuple[tuple[int, int], ...]:
    """Return the modification times and sizes of our certificate and key."""
    found = []
    for path in (settings.cert, settings.key):
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found.append((stat.st_mtime_ns, stat.st_size))
    return tuple(found)
