"""The HTTP server of a router: uvicorn without its signal handlers, on the process's event loop, with deadlines for slow clients,
and the ASGI application that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdmesh.platform import linux
from pdmesh.platform.capabilities import USER_TIMEOUT
from pdmesh.runtime import ports
from pdmesh.runtime.addresses import bare_host, join_address
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.tls import Tls
from router.api.http import connection
from router.api.http.body import HttpSettings, error_response
from router.api.http.connection import ABORT, RECEIVED_NS
from router.api.http.errors import HttpError
from router.api.http.headers import HEADER, WithRequestId, new_id
from router.auth.api_keys import KeyStore
from router.config import RouterConfig
from router.telemetry.timings import now_ns

# Limits for slow clients: uvicorn's protocol with a limit of connections, and with deadlines for what a client sends.
#
#     connected, or a first byte ──HEAD_S──► a whole head ──► the handler (body: `body.READ_TIMEOUT_S`) ──► answered
#                                                             └── what the handler left of the body: REST_S
#
# Between requests the server's keep-alive timeout applies. A late client gets 408, and its connection is closed.

HEAD_S = 20.0
REST_S = 10.0


class PatientProtocol(H11Protocol):
    """Serve one connection. The server sets `max_connections` of the class."""

    max_connections: ClassVar[int] = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection at once if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            problem = f"there are {self.max_connections} connections (http_max_connections)"
            self._refuse(HttpError(503, problem, code="service_unavailable"))
            return
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in bytes. An incomplete head or body keeps its deadline: single bytes do not extend it."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Set a new deadline for the rest of the request, or for a next request that has begun already."""
        super().on_response_complete()
        self._expect(None)
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            return  # between requests
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Send the same form of error as the rest of the gateway."""
        self._refuse(HttpError(400, msg))

    def _watch(self) -> None:
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        if self.conn.their_state is h11.IDLE:
            self._expect(HEAD_S, again=False)
        elif self.conn.their_state is h11.SEND_BODY and answered:
            self._expect(REST_S, again=False)
        else:
            self._expect(None)

    def _expect(self, delay_s: float | None, *, again: bool = True) -> None:
        """Close the connection in `delay_s`; None: nothing is expected for now. Not `again`: a deadline that is already set
        stays."""
        if self._deadline is not None:
            if delay_s is not None and not again:
                return
            self._deadline.cancel()
            self._deadline = None
        if delay_s is not None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(delay_s, self._late)

    def _late(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE:
            self._refuse(HttpError(408, f"no whole head of a request came within {HEAD_S:g} s"))
        else:
            self.transport.abort()

    def _refuse(self, error: HttpError) -> None:
        """Send the error, if the response has not begun, and close. The socket's own limits end a client that does not read."""
        self._expect(None)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(error)
            headers = [*answer.raw_headers, (b"connection", b"close"), (HEADER.encode(), new_id().encode())]
            self.transport.write(_wire(self.conn, answer.status_code, headers, bytes(answer.body)))
        self.transport.close()


def _wire(conn: h11.Connection, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    events = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
    return b"".join(conn.send(event) for event in events)


KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that the clients close them
GRACE_S = 1.0
TICK_S = 1.0
BACKLOG = 1024
KEEP_ALIVE_PROBE_S = 10

logger = logging.getLogger(__name__)


class HttpServer:
    """Run one listening port, from `start` to `stop`."""

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
        """Create a server that does not listen yet. `port` 0: any free one. `share_port`: other processes of this user may listen
        there, too."""
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
        """Return the bound address without a path."""
        return f"{'https' if self._server.config.ssl else 'http'}://{join_address(self._host, self._port)}"

    async def start(self) -> None:
        """Bind the address and serve. Raises ConfigError when it cannot be bound."""
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
        """Stop accepting connections, give running responses GRACE_S, then close them. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self._server.stop()
        await asyncio.wait((task,), timeout=GRACE_S)
        for peer in list(self._server.server_state.connections):
            _abort(peer)  # its handler sees a client that leaves
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
        scope[ABORT] = partial(self._abort_scope, scope)
        # A pipelined request has no time yet: it waited for the end of the one before it.
        scope.setdefault(RECEIVED_NS, now_ns())
        await self._app(scope, receive, send)

    def _abort_scope(self, scope: Scope) -> None:
        for peer in self._server.server_state.connections:
            if getattr(peer, "scope", None) is scope:
                _abort(peer)
                return


class _Protocol(PatientProtocol):
    """Record when a request arrived, because parsing it and waiting for the event loop count into its duration."""

    def data_received(self, data: bytes) -> None:
        received_ns = now_ns()
        super().data_received(data)
        if self.scope is not None:
            cast("dict[str, object]", self.scope)[RECEIVED_NS] = received_ns


class _Server(uvicorn.Server):
    """Stop when it is told to, not by signals, which belong to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `serve`."""
        self.should_exit = True
        self._stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the process's signal handlers alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """Keep the Date header current until `stop`."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopping.wait()


def _listen(host: str, port: int, *, share_port: bool = False) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    found = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    # With its protocol named, asyncio disables Nagle's algorithm on the connections: else each event may wait for an ACK.
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # a restarted router binds at once; on Windows this would let two processes share a port
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
    """Set keep-alive and user timeout, which accepted sockets inherit (Linux): the kernel then notices peers that are gone, or
    that read nothing. Other systems keep their own defaults."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), KEEP_ALIVE_PROBE_S)
    if USER_TIMEOUT.is_there:
        linux.set_user_timeout(listening, connection.STALLED_S)


def _abort(peer: object) -> None:
    transport = getattr(peer, "transport", None)
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()


# The ASGI application: its routes, and the responses to errors.

_EXPOSED = (HEADER, "Request-Id", "Retry-After", "Retry-After-Ms", "X-Should-Retry")
"""Headers of responses that scripts of other origins may read."""


def build_app(routes: Sequence[Route], cors_origins: Sequence[str] = ()) -> Starlette:
    """Return an application that answers on these routes, and says which there are on any other. `cors_origins`: whose web pages
    may call it, "*" for any; browsers refuse those of all others."""
    paths = ", ".join(dict.fromkeys(route.path for route in routes))

    async def no_route(request: Request, error: Exception) -> Response:
        """Answer an unknown path or a wrong method, which Starlette finds itself."""
        assert isinstance(error, HTTPException)
        where = f"{request.method[:20]} {request.url.path[:200]}"
        problem = f"does not exist; there is {paths}" if error.status_code == 404 else "is not possible; use another method"
        response = error_response(HttpError(error.status_code, f"{where} {problem}"))
        response.headers.update(error.headers or {})
        return response

    cors = Middleware(
        CORSMiddleware,
        allow_origins=cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )
    return Starlette(routes=list(routes), exception_handlers={HTTPException: no_route}, middleware=[cors] if cors_origins else [])


# The gateway of one router: the endpoints of its protocols, on a port of their own.


def open_gateway(
    config: RouterConfig, routes_with: Callable[[HttpSettings], Sequence[Route]], tls: Tls | None, keys: KeyStore | None
) -> HttpServer | None:
    """Return a server that does not listen yet; None where no HTTP is wanted. With TLS it serves https, and asks for client
    certificates as gRPC does."""
    if config.http_port is None:
        return None
    settings = HttpSettings(config.http_max_body_bytes, keys)
    context = None if tls is None else tls.listening_context(require_client=config.tls_client_auth == "require")
    return HttpServer(
        build_app(routes_with(settings), config.http_cors_origin),
        config.http_host or config.host,
        config.http_port,
        context,
        max_connections=config.http_max_connections,
        share_port=config.share_ports,
    )
