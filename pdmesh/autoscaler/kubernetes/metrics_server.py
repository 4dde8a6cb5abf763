"""Listens for whoever asks for the wanted replicas, on the loop of the autoscaler."""

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
from pdmesh.runtime.config import ConfigError

# Who may ask for external metrics: the API server alone, which shows a certificate of a CA that is made for that.
#
# It says who that CA is in the ConfigMap extension-apiserver-authentication of kube-system. Whether the user may read the metric,
# it has asked itself; there is no second question here.


CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"


@dataclass(frozen=True)
class Callers:
    """`ca`: PEM. `names`: common names of certificates that count; empty: all that the CA has signed."""

    ca: str
    names: tuple[str, ...] = ()

    def knows(self, certificate: dict[str, Any] | None) -> bool:
        """A certificate of the CA, as `SSLSocket.getpeercert` shows it. None: there is none."""
        if not certificate:
            return False
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        return not self.names or any(name in self.names for name in names)


async def read_front_proxy(api: Api) -> Callers:
    """What the cluster says. Raises PlatformError."""
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
"""Between two looks at who may ask, and at the certificate: both are replaced while a pod runs."""
RETRY_S = 5.0
"""The same, as long as it is not known who may ask."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Trust:
    """What the port of external metrics was opened with: who may ask, and which files say who we are."""

    callers: Callers
    files: tuple[tuple[int, int], ...]


class MetricsServer:
    """From `start` to `close`. `ports`: as bound, by "kubernetes" and "json"."""

    def __init__(self, settings: MetricsSettings, cluster: KubernetesSettings, host: str, model: str) -> None:
        """Raises ConfigError."""
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
        """Raises ConfigError where the files or a port cannot be used. Where the cluster does not say who may ask, its port
        refuses connections and the question is put again and again: decisions do not wait for it."""
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
        """Idempotent."""
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
        """Opens the port once it is known who may ask, and anew when that has changed, or our certificate has: what was trusted
        cannot be taken from a context that serves. Raises ConfigError."""
        try:
            trust = _Trust(await self._callers(), _versions(self._settings))
            if trust != self._trust:
                await self._open(trust, _context(self._settings, trust.callers))
        except (PlatformError, ssl.SSLError) as error:
            self._warn(error)
        else:
            self._problem = ""

    async def _open(self, trust: _Trust, context: ssl.SSLContext) -> None:
        """In place of the one before, whose connections end. Who asks between the two waits in the queue of the port."""
        assert self._port is not None
        if self._kubernetes is not None:
            logger.info("the port of external metrics is opened anew: who may ask, or our certificate, has changed")
            await self._kubernetes.end()
        self._kubernetes = _Running(self._metrics.kubernetes_app(), self._port.dup(), context, trust.callers)
        self._trust = trust

    def _warn(self, problem: Exception) -> None:
        """Once."""
        if str(problem) != self._problem:
            state, period_s = ("stays closed", RETRY_S) if self._trust is None else ("stays as it was opened", RELOAD_S)
            logger.warning("the port of external metrics %s, tried again every %g s: %s", state, period_s, problem)
        self._problem = str(problem)

    async def _callers(self) -> Callers:
        """Raises ConfigError, PlatformError."""
        if self._settings.client_ca:
            return Callers(_certificates(self._settings.client_ca), self._settings.client_names)
        api = open_api(self._cluster)
        try:
            return await read_front_proxy(api)
        finally:
            api.close()


class _Running:
    """A server on a socket, which it closes at its end. `context` None: no TLS; `callers` None: anybody may ask."""

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
        """Answers are finished within a moment, unless `force`."""
        self._server.should_exit, self._server.force_exit = True, force
        await asyncio.wait({self._task}, timeout=STOP_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class _Protocol(H11Protocol):
    """Ends connections of who is not known. Nobody else gets through the handshake than those of the CA."""

    callers: Callers | None = None

    def ends(self) -> bool:
        """Whether the server does: a handshake that it began may be done only now, by a CA that is trusted no more."""
        return False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        certificate: dict[str, Any] | None = transport.get_extra_info("peercert")
        if self.callers is not None and not self.callers.knows(certificate):
            logger.warning("someone who is not the API server asked for metrics: %s", (certificate or {}).get("subject"))
            transport.abort()
        elif self.ends():
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


def _context(settings: MetricsSettings, callers: Callers | None = None) -> ssl.SSLContext:
    """No handshake without a certificate of their CA. Raises ConfigError for our own files, SSLError for that CA."""
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
    """Of our certificate and its key."""
    found = []
    for path in (settings.cert, settings.key):
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found.append((stat.st_mtime_ns, stat.st_size))
    return tuple(found)
