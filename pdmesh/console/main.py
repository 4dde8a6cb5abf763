"""The console process: wires the parts together.

OTLP ─► otlp.py ─┬─► store.py ────┐
                 └─► forwarder    ├─► state.py ─► server.py ─► the page
routers ◄─ topology.py ───────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp

from pdmesh.client.channel import DEFAULT_ADDRESS, addresses, checked_key
from pdmesh.console.otlp import Forwarder, OtlpReceiver
from pdmesh.console.prompting import Mesh
from pdmesh.console.server import Console
from pdmesh.console.state import Events, State
from pdmesh.console.store import Bounds, Store
from pdmesh.console.topology import Topology
from pdmesh.runtime import config as runtime_config
from pdmesh.runtime import log, process
from pdmesh.runtime.addresses import bare_host, join_address
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.tls import ClientTlsConfig, open_tls
from pdmesh.runtime.telemetry.config import parse_endpoint
from pdmesh.runtime.telemetry.received import Export

# The configuration: flags, environment and `--help` come from this dataclass.


@dataclass(frozen=True)
class ConsoleConfig:
    """Show a mesh on a page: python -m pdmesh.console --routers 127.0.0.1:8100."""

    routers: tuple[str, ...] = field(
        default=(DEFAULT_ADDRESS,), metadata={"help": "routers of the mesh, host:port, comma separated"}
    )
    host: str = field(
        default="127.0.0.1", metadata={"help": "address to serve the page on; anyone who reaches it may use the mesh"}
    )
    port: int = field(default=8200, metadata={"help": "port of the page; 0: any free one"})
    allowed_hosts: tuple[str, ...] = field(
        default=(), metadata={"help": "more names under which browsers may ask for the page; addresses and localhost always may"}
    )
    otlp_host: str = field(default="127.0.0.1", metadata={"help": "address to take traces on, by OTLP over gRPC"})
    otlp_port: int = field(default=4317, metadata={"help": "port to take traces on; 0: any free one"})
    otlp_port_is_held: bool = field(
        default=False, metadata={"help": "the parent process holds that port, by a socket that does not listen"}
    )
    forward_otlp: str = field(
        default="", metadata={"help": "collector to which all of it is forwarded, host:port or https://host:port; empty: none"}
    )
    max_traces: int = field(default=2000, metadata={"help": "traces that are kept, the newest"})
    max_age_s: float = field(default=900.0, metadata={"help": "how long they are kept"})
    max_mib: int = field(default=128, metadata={"help": "memory that they may take, in MiB"})
    api_key: str = field(default="", metadata={"help": "API key of an admin, for routers that require one", "secret": True})
    tls: ClientTlsConfig = field(default_factory=ClientTlsConfig, metadata={"flatten": True})
    exit_with_parent: bool = field(default=False, metadata={"help": "end when the process that started this one ends"})

    def validate(self) -> None:
        """Raise ConfigError, or ValueError that names the field."""
        if not self.routers:
            raise ConfigError("routers", "is empty", f"name at least one, such as {DEFAULT_ADDRESS}")
        for name in ("port", "otlp_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(name, f"{getattr(self, name)} is not a port", "give 0 to 65535")
        for name, least in (("max_traces", 1), ("max_age_s", 1.0), ("max_mib", 1)):
            if not getattr(self, name) >= least:
                raise ConfigError(name, f"{getattr(self, name):g} is less than {least:g}", f"give {least:g} or more")
        if self.forward_otlp:
            parse_endpoint(self.forward_otlp, "forward_otlp")
        checked_key(self.api_key)


# An HTTP server on the event loop of a process that handles signals itself.


GRACE_S = 1
MAX_CONNECTIONS = 128
BACKLOG = 64


class HttpServer:
    """Serve one port, from `start` to `stop`."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Create the server on `port`; 0: any free one."""
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
        """Return "host:port" as bound."""
        return join_address(self._host, self._port)

    async def start(self) -> None:
        """Bind and answer. Raises ConfigError if the port is taken."""
        listening = self._bind()
        self._port = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="http")
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Stop; running answers get a moment. Idempotent."""
        if self._task is not None:
            task, self._task = self._task, None
            self._server.should_exit = True
            await asyncio.wait((task,), timeout=2 * GRACE_S + 1)
            task.cancel()

    def _bind(self) -> socket.socket:
        try:
            family = socket.getaddrinfo(bare_host(self._host), self._port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((bare_host(self._host), self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            problem = f"cannot listen on {self._host} port {self._port}: {error.strerror or error}"
            raise ConfigError("--port", problem, "choose another --port, or 0 for any free one") from None


class _Server(uvicorn.Server):
    """Stop when told to, not by signals: those are the process's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        self.listening.set()


LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

logger = logging.getLogger(__name__)


class ConsoleProcess:
    """Hold all parts, from `start` to `stop`."""

    def __init__(self, config: ConsoleConfig) -> None:
        """Create the parts. Raises ConfigError."""
        self._config = config
        routers = addresses(config.routers)
        metadata = (("authorization", f"Bearer {config.api_key}"),) if config.api_key else None
        self._store = Store(Bounds(config.max_traces, config.max_age_s, config.max_mib << 20))
        self._topology = Topology(routers, open_tls(config.tls), metadata, on_change=self._changed)
        state = State(self._store, self._topology, forwards_to=config.forward_otlp)
        self._events = Events(state.snapshot)
        tls = config.tls if config.tls.is_set else None
        console = Console(state, self._events, Mesh(routers, tls, config.api_key))
        self._http = HttpServer(console.app(config.allowed_hosts), config.host, config.port)
        self._otlp = OtlpReceiver(
            config.otlp_host, config.otlp_port, self._took, self._handed_on, is_held=config.otlp_port_is_held
        )
        self._forwarder = Forwarder(parse_endpoint(config.forward_otlp), os.environ) if config.forward_otlp else None
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        """Return the URL of the page, once it has started."""
        return f"http://{self._http.address}"

    async def start(self) -> str:
        """Listen; return the address that receives traces. Raises ConfigError; `stop` it all the same."""
        if self._config.host not in LOOPBACK:
            logger.warning("anyone who reaches %s may see and use this mesh", self._config.host)
        self._events.start()
        self._topology.start()
        self._stack.push_async_callback(self._topology.stop)
        if self._forwarder is not None:
            self._forwarder.start()
            self._stack.push_async_callback(self._forwarder.stop)
        otlp_address = await self._otlp.start()
        self._stack.push_async_callback(self._otlp.stop)
        await self._http.start()
        self._stack.push_async_callback(self._http.stop)
        self._stack.push_async_callback(self._events.stop)  # the first to end: its streams never end by themselves
        return otlp_address

    async def stop(self) -> None:
        """Stop. Idempotent."""
        await self._stack.aclose()

    def _changed(self) -> None:
        self._events.changed()

    def _took(self, export: Export) -> None:
        self._store.add(export.spans, time.time())
        self._events.changed()

    def _handed_on(self, method: str, body: bytes) -> None:
        if self._forwarder is not None:
            self._forwarder.put(method, body)


async def serve(config: ConsoleConfig, life: process.Lifecycle) -> None:
    """Serve until the process is to stop."""
    console = ConsoleProcess(config)
    try:
        otlp_address = await console.start()
        life.ready(console.url.removeprefix("http://"), http_url=console.url, otlp_address=otlp_address)
        logger.info("the console is at %s; it takes traces on %s", console.url, otlp_address)
        await life.wait_for_stop()
    finally:
        await console.stop()


def main() -> None:
    """Run `python -m pdmesh.console`."""
    config = runtime_config.load(ConsoleConfig, None, os.environ, prog="pdmesh.console")
    log.configure("console")
    process.end(process.run(lambda life: serve(config, life), exit_with_parent=config.exit_with_parent))
