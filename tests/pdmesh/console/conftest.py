"""A console on real sockets, in front of a router with a script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest_asyncio

from pdmesh.console.main import ConsoleConfig, ConsoleProcess
from tests.pdmesh.console.made import Made, Script, exports, made_router, send


@dataclass
class Running:
    """A console, and who asks it."""

    url: str
    otlp: str
    script: Script
    http: httpx.AsyncClient

    async def take(self, *requests: Made) -> None:
        """Their spans, by OTLP."""
        for made in requests:
            await send(self.otlp, *exports(made))


@asynccontextmanager
async def running_console(router: str, script: Script, **settings: object) -> AsyncIterator[Running]:
    """With these settings; `router` may be several, comma separated."""
    routers = tuple(router.split(","))
    console = ConsoleProcess(ConsoleConfig(routers=routers, port=0, otlp_port=0, **settings))  # type: ignore[arg-type]
    try:
        otlp = await console.start()
        async with httpx.AsyncClient(base_url=console.url, timeout=20, trust_env=False) as http:
            yield Running(console.url, otlp, script, http)
    finally:
        await console.stop()


@pytest_asyncio.fixture
async def console() -> AsyncIterator[Running]:
    """With default settings."""
    script = Script()
    async with made_router(script) as router, running_console(router, script) as running:
        yield running
