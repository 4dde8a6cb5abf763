"""An HTTP server on the event loop of a process that has other things to do: uvicorn without its signals and its waiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Generator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pdmesh.runtime import ports
from pdmesh.runtime.config import ConfigError
from router.api.openai import connection
from router.api.openai.patience import PatientProtocol
from router.api.openai.request_id import WithRequestId
from router.telemetry.timings import now_ns

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that it is they who close
GRACE_S = 1.0
TICK_S = 1.0
BACKLOG = 1024
KEEP_ALIVE_PROBE_S = 10

logger = logging.getLogger(__name__)


class HttpServer:
    """One listening port, from `start` to `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        *,
        max_connections: int = 1024,
        share_port: bool = False,
    ) -> None:
        """`port` 0: any free one. `share_port`: others of this user may listen there, too."""
        self._app = WithRequestId(app)
        self._host = host
        self._port = port
        self._share_port = share_port
        protocol = type("LimitedProtocol", (_Protocol,), {"max_connections": max_connections})
        config = uvicorn.Config(
            self._serve, http=protocol, ws="none", lifespan="off", interface="asgi3", proxy_headers=False, server_header=False,
            log_config=None, log_level="warning", access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        config.ssl = context
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """As bound, without a path."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._server.config.ssl else 'http'}://{host}:{self._port}"

    async def start(self) -> None:
        """Binds and answers. Raises ConfigError when the address cannot be bound."""
        listening = self._bind()
        self._port = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="http")
        listening_now = asyncio.ensure_future(self._server.listening.wait())
        await asyncio.wait((self._task, listening_now), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            listening_now.cancel()
            await self._task
        logger.info("HTTP on %s", self.url)

    async def stop(self) -> None:
        """No new connections; answers under way get a moment, then they are cut off. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self._server.stop()
        await asyncio.wait((task,), timeout=GRACE_S)
        for peer in list(self._server.server_state.connections):
            _abort(peer)  # its handler hears of it as of any client that leaves
        await asyncio.wait((task,), timeout=GRACE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _bind(self) -> socket.socket:
        try:
            return _listen(self._host, self._port, share_port=self._share_port)
        except OSError as error:
            problem = f"cannot listen on {self._host} port {self._port} for HTTP: {error.strerror or error}"
            raise ConfigError("--http-port", problem, "choose another --http-port, or 0 for any free one") from None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[connection.ABORT] = partial(self._abort_scope, scope)
        scope.setdefault(connection.RECEIVED_NS, now_ns())  # one that came behind another, and had to wait for its end
        await self._app(scope, receive, send)

    def _abort_scope(self, scope: Scope) -> None:
        for peer in self._server.server_state.connections:
            if getattr(peer, "scope", None) is scope:
                _abort(peer)
                return


class _Protocol(PatientProtocol):
    """Notes when a request came: parsing it and waiting for a turn on the event loop belong to the time that it takes."""

    def data_received(self, data: bytes) -> None:
        received_ns = now_ns()
        super().data_received(data)
        if self.scope is not None:
            cast("dict[str, object]", self.scope)[connection.RECEIVED_NS] = received_ns


class _Server(uvicorn.Server):
    """Stops when it is told to, not by signals: those are the process's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends `serve`."""
        self.should_exit = True
        self._stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves them alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """Keeps the Date header right until `stop`."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)


def _listen(host: str, port: int, *, share_port: bool = False) -> socket.socket:
    """Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    # With its protocol named, asyncio takes Nagle's delay off the connections: else each event may wait for an ACK.
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # a router that comes back has its port at once; elsewhere it means that two may share one
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            ports.share(listening)
        _watch_peers(listening)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _watch_peers(listening: socket.socket) -> None:
    """Accepted sockets inherit it (Linux): who is gone without a word, or takes nothing of what the kernel has for him, is
    noticed there. Other systems have their own defaults."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEP_ALIVE_PROBE_S),
        ("TCP_KEEPINTVL", KEEP_ALIVE_PROBE_S),
        ("TCP_USER_TIMEOUT", round(connection.STALLED_S * 1000)),
    ):
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _abort(peer: object) -> None:
    transport = getattr(peer, "transport", None)
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()
