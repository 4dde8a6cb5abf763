"""Who looks at a mesh while it works: something that scrapes its metrics each second, and a page of its console.

Each looks during a turn of its mesh only: else it would take the processor from those that the mesh is compared with.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx

from benchmarks.harness import say
from pdmesh.launcher.local_state import Target, discovery
from tests.support.prometheus import BINARY, Prometheus, running_prometheus

PERIOD_S = 1.0


class Scraper:
    """Looks at all `targets`, each second."""

    name = "an HTTP client"
    pid: int | None = None  # of a process of its own
    num_scrapes = 0

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(timeout=10, trust_env=False)

    @asynccontextmanager
    async def looking(self, targets: Sequence[Target]) -> AsyncIterator[None]:
        """Inside."""
        task = asyncio.create_task(self._run([url for target in targets for url in target.urls]))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self, urls: Sequence[str]) -> None:
        while True:
            for url in urls:
                (await self._http.get(url)).raise_for_status()
                self.num_scrapes += 1
            await asyncio.sleep(PERIOD_S)

    async def count(self) -> int:
        """Scrapes that have succeeded so far."""
        return self.num_scrapes

    async def close(self) -> None:
        """Idempotent."""
        await self._http.aclose()


class PrometheusScraper(Scraper):
    """A real one; it is told by the file that it follows."""

    name = "Prometheus"

    def __init__(self, prometheus: Prometheus, file: Path) -> None:
        super().__init__()
        self._prometheus, self._file = prometheus, file
        self.pid = prometheus.pid

    @asynccontextmanager
    async def looking(self, targets: Sequence[Target]) -> AsyncIterator[None]:
        self._tell(targets)
        try:
            yield
        finally:
            self._tell(())

    def _tell(self, targets: Sequence[Target]) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(discovery(targets)))
        new.replace(self._file)

    async def count(self) -> int:
        return round(sum(await self._prometheus.values("sum(sum_over_time(up[1h]))")))


@asynccontextmanager
async def scraper(folder: Path) -> AsyncIterator[Scraper]:
    """Prometheus, where there is one; `folder` gets its files."""
    async with AsyncExitStack() as stack:
        if BINARY is None:
            say("prometheus is not installed: an HTTP client scrapes instead")
            found = Scraper()
        else:
            file = folder / "targets.json"
            file.write_text("[]")
            found = PrometheusScraper(await stack.enter_async_context(running_prometheus(folder, file)), file)
        stack.push_async_callback(found.close)
        yield found


class Page:
    """A page of a console: follows its events, and reads them."""

    def __init__(self) -> None:
        self.num_states = 0

    @asynccontextmanager
    async def looking(self, url: str) -> AsyncIterator[None]:
        """Inside."""
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            task = asyncio.create_task(self._follow(http))
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _follow(self, http: httpx.AsyncClient) -> None:
        async with http.stream("GET", "/api/events") as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    json.loads(line.removeprefix("data: "))
                    self.num_states += 1
