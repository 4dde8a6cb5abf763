"""How much of a mesh is told to others: nothing, traces, metrics, or all of it while somebody looks at its page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import say
from benchmarks.observability.looking import Page, Scraper
from benchmarks.observability.turns import Job, Turn, turn
from benchmarks.router.options import MODEL
from benchmarks.router.processes import Process
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

# Whatever our own environment says of collectors is not for these meshes.
_NO_OTHERS = {"OTEL_SDK_DISABLED": "true"}
_NOWHERE = {**_NO_OTHERS, "PDMESH_OTLP_ENDPOINT": ""}


@dataclass(frozen=True)
class Way:
    """`sent`: traces, and by OTLP every ten seconds metrics too, to a collector that does nothing. `scraped`: each second.
    `shown`: to a console, which a page follows; it gets what would be `sent`."""

    name: str
    sent: bool = False
    scraped: bool = False
    shown: bool = False

    def config(self, model: Path, collector: str) -> LocalMeshConfig:
        """A router, a prefill worker and a decode worker, as `pdmesh up` starts them."""
        return LocalMeshConfig(
            model=str(model),
            model_name=MODEL,
            port=0,
            metrics_port=0 if self.scraped else None,
            console_port=0 if self.shown else None,
            otlp_endpoint=collector if self.sent else "",
            worker_args=("--kv-memory-mb", "512"),
            env=_NO_OTHERS if self.sent else _NOWHERE,
        )


OFF = Way("off")
TRACES = Way("traces", sent=True)
METRICS = Way("metrics", scraped=True)
ALL = Way("traces, metrics and console", scraped=True, shown=True)
ON = (TRACES, METRICS, ALL)


@dataclass(frozen=True)
class Side:
    """A mesh that runs, and who looks at it during its turns."""

    way: Way
    mesh: LocalMesh
    client: AsyncClient
    sink: Process
    scraper: Scraper
    page: Page

    @property
    def pids(self) -> dict[str, int]:
        """Of the mesh, and of whoever takes what it tells."""
        taking: dict[str, int] = {}
        if self.way.sent:
            taking["collector"] = self.sink.popen.pid
        if self.way.scraped and self.scraper.pid is not None:
            taking["scraper"] = self.scraper.pid
        return {**self.mesh.pids, **taking}

    async def take_turn(self, work: list[Job]) -> Turn:
        """Looked at, if it is to be."""
        async with AsyncExitStack() as stack:
            if self.way.scraped:
                await stack.enter_async_context(self.scraper.looking(self.mesh.metrics_targets))
            if self.way.shown:
                await stack.enter_async_context(self.page.looking(self.mesh.console_url))
            return await turn(self.client, self.pids, work)

    async def check_looked(self) -> None:
        """What nobody has looked at costs nothing, and says nothing. Raises RuntimeError."""
        seen: dict[str, int] = {}
        if self.way.sent:
            seen["calls to the collector"] = self.sink.ask()["num_calls"]
        if self.way.scraped:
            seen["scrapes"] = await self.scraper.count()
        if self.way.shown:
            seen["states of the page"] = self.page.num_states
        say(", ".join(f"{name}: {count}" for name, count in seen.items()))
        if missing := [name for name, count in seen.items() if not count]:
            raise RuntimeError(f"nobody looked: no {', no '.join(missing)}")


@dataclass(frozen=True)
class Lookers:
    """Who takes what meshes tell. `collector`: the address of `sink`."""

    sink: Process
    collector: str
    scraper: Scraper

    @asynccontextmanager
    async def side(self, way: Way, model: Path) -> AsyncIterator[Side]:
        """A mesh that is told of in this way. Raises StartFailed."""
        say(f"a mesh: {way.name}")
        async with (
            LocalMesh(way.config(model, self.collector), on_event=say) as mesh,
            AsyncClient(mesh.router_addresses) as client,
        ):
            side = Side(way, mesh, client, self.sink, self.scraper, Page())
            yield side
            await side.check_looked()
