"""The console process: wires the parts together.

OTLP ─► otlp.py ─┬─► store.py ──────┐
                 └─► forward.py     ├─► state.py ─► events.py, server.py ─► the page
routers ◄─ topology.py ─────────────┘
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import AsyncExitStack

from pdmesh.client.channel import addresses
from pdmesh.console.config import ConsoleConfig
from pdmesh.console.events import Events
from pdmesh.console.forward import Forwarder
from pdmesh.console.http import HttpServer
from pdmesh.console.otlp import OtlpReceiver
from pdmesh.console.prompting import Mesh
from pdmesh.console.server import Console
from pdmesh.console.state import State
from pdmesh.console.store import Bounds, Store
from pdmesh.console.topology import Topology
from pdmesh.runtime import config as configuration
from pdmesh.runtime import log, process
from pdmesh.runtime.rpc.tls import open_tls
from pdmesh.runtime.telemetry.config import parse_endpoint
from pdmesh.runtime.telemetry.received import Export

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

logger = logging.getLogger(__name__)


class ConsoleProcess:
    """All parts, from `start` to `stop`."""

    def __init__(self, config: ConsoleConfig) -> None:
        """Raises ConfigError."""
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
        """Of the page, once it has started."""
        return f"http://{self._http.address}"

    async def start(self) -> str:
        """Listens; returns the address that takes traces. Raises ConfigError; `stop` it all the same."""
        if self._config.host not in LOOPBACK:
            logger.warning("whoever reaches %s may see this mesh and use it", self._config.host)
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
        self._stack.push_async_callback(self._events.stop)  # the first to end: its streams last for ever
        return otlp_address

    async def stop(self) -> None:
        """Idempotent."""
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
    """Until the process is to stop."""
    console = ConsoleProcess(config)
    try:
        otlp_address = await console.start()
        life.ready(console.url.removeprefix("http://"), http_url=console.url, otlp_address=otlp_address)
        logger.info("the console is at %s; it takes traces on %s", console.url, otlp_address)
        await life.wait_for_stop()
    finally:
        await console.stop()


def main() -> None:
    """`python -m pdmesh.console`."""
    config = configuration.load(ConsoleConfig, None, os.environ, prog="pdmesh.console")
    log.configure("console")
    sys.exit(process.run(lambda life: serve(config, life), exit_with_parent=config.exit_with_parent))
