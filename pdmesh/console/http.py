"""An HTTP server on the event loop of a process that handles signals itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from pdmesh.runtime.config import ConfigError

GRACE_S = 1
MAX_CONNECTIONS = 128
BACKLOG = 64


class HttpServer:
    """One listening port, from `start` to `stop`."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """`port` 0: any free one."""
        self._host, self._port = host, port
        config = uvicorn.Config(
            app, ws="none", lifespan="off", interface="asgi3", proxy_headers=False, server_header=False,
            log_config=None, log_level="critical", access_log=False,
            limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """ "host:port" as bound."""
        return f"{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    async def start(self) -> None:
        """Binds and answers. Raises ConfigError where the port is taken."""
        listening = self._bind()
        self._port = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="http")
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Answers under way get a moment. Idempotent."""
        if self._task is not None:
            task, self._task = self._task, None
            self._server.should_exit = True
            await asyncio.wait((task,), timeout=2 * GRACE_S + 1)
            task.cancel()

    def _bind(self) -> socket.socket:
        try:
            family = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((self._host, self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            problem = f"cannot listen on {self._host} port {self._port}: {error.strerror or error}"
            raise ConfigError("--port", problem, "choose another --port, or 0 for any free one") from None


class _Server(uvicorn.Server):
    """Stops when it is told to, not by signals: those are the process's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves them alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        await super().startup(sockets)
        self.listening.set()
