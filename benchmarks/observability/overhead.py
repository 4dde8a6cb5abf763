"""What it costs a mesh to be followed: throughput and CPU time, beside a mesh of which nobody hears."""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Literal, TypeVar

import httpx

from benchmarks.harness import MODEL, Figure, Options, Process, beside, process_cpu_ns, running, say
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.local_state import Target, discovery
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from tests.support.prometheus import BINARY, Prometheus, running_prometheus

# The load of one turn, the same work in each, and what it took; and turns compared with those just before and behind.


AT_ONCE = 12
TIMEOUT_S = 120.0
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 300), (32, 128)
"""From, to: as in a chat; each length as likely as any other."""


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    num_tokens: int


def jobs(turn: int, count: int) -> list[Job]:
    """Of a turn: the lengths are those of every other, the tokens nobody has seen, so that no prefix is cached. Pure."""
    lengths, tokens = random.Random(0), random.Random(f"turn {turn}")
    sizes = [(lengths.randint(*PROMPT_TOKENS), lengths.randint(*OUTPUT_TOKENS)) for _ in range(count)]
    return [Job(tuple(tokens.choices(range(1000, 40_000), k=length)), num_tokens) for length, num_tokens in sizes]


@dataclass(frozen=True)
class Turn:
    """`cpu_s`: of each process, by name."""

    tokens_per_s: float
    num_requests: int
    cpu_s: Mapping[str, float]

    def cpu_ms(self, *kinds: str) -> float:
        """Per request, of the processes whose names begin so."""
        return 1e3 * sum(seconds for name, seconds in self.cpu_s.items() if name.startswith(kinds)) / self.num_requests


async def turn(client: AsyncClient, pids: Mapping[str, int], work: Sequence[Job]) -> Turn:
    """All of `work`, `AT_ONCE` at a time: as one ends the next begins."""
    waiting = iter(work)
    before, began_s = _cpu_s(pids), time.perf_counter()

    async def one_after_the_other() -> None:
        for job in waiting:
            await client.generate(
                job.prompt, max_tokens=job.num_tokens, ignore_eos=True, temperature=0, mode="remote", timeout=TIMEOUT_S
            )

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    took_s, after = time.perf_counter() - began_s, _cpu_s(pids)
    num_tokens = sum(job.num_tokens for job in work)
    return Turn(num_tokens / took_s, len(work), {name: after[name] - before[name] for name in pids})


def _cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: process_cpu_ns(pid) / 1e9 for name, pid in pids.items()}


Name = TypeVar("Name", bound=Hashable)


def ratios(values: Sequence[tuple[Name, float]], base: Name) -> dict[Name, list[float]]:
    """Of each value that has one of `base` before and behind it, its ratio to the mean of these two, by name. `base` itself is
    compared with the next of its own on either side: how far apart equals are. Pure."""
    found: dict[Name, list[float]] = {}
    bases = [index for index, (name, _) in enumerate(values) if name == base]
    for index, (name, value) in enumerate(values):
        before = max((at for at in bases if at < index), default=None)
        behind = min((at for at in bases if at > index), default=None)
        if before is not None and behind is not None:
            found.setdefault(name, []).append(value / mean((values[before][1], values[behind][1])))
    return found


def spread(found: Sequence[float]) -> str:
    """In words."""
    low, _, high = quantiles(found, n=4)
    return f"quartiles of {len(found)} turns: {low:.3f} to {high:.3f}; the median's standard error: {_median_error(found):.4f}"


def _median_error(found: Sequence[float]) -> float:
    """As it is where values are spread normally: sqrt(pi / 2) times that of the mean."""
    return math.sqrt(math.pi / 2 / len(found)) * stdev(found)


# Who looks at a mesh while it works: something that scrapes its metrics each second, and a page of its console.
#
# Each looks during a turn of its mesh only: else it would take the processor from those that the mesh is compared with.


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
        async with beside(self._run([url for target in targets for url in target.urls])):
            yield

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
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http, beside(self._follow(http)):
            yield

    async def _follow(self, http: httpx.AsyncClient) -> None:
        async with http.stream("GET", "/api/events") as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    json.loads(line.removeprefix("data: "))
                    self.num_states += 1


# How much of a mesh is told to others: nothing, traces, metrics, or all of it while somebody looks at its page.


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


GOAL = 0.98
ROUNDS, SIZE, QUICK_SIZE = 8, 24, 12
"""Pairs of turns of each way. Requests of a turn: seven to ten seconds' work."""
IDLE_S = 5.0
TELLING = ("router", "console", "collector", "scraper")
KINDS = ("prefill", "decode", *TELLING)
Taken = Sequence[tuple[Way, Turn]]


async def figures(options: Options) -> list[Figure]:
    """The mesh that is off beside one of the others: off, on, off, on …, so that each turn is compared with those beside it."""
    with tempfile.TemporaryDirectory() as folder, running("benchmarks.observability.sink") as sink:
        async with scraper(Path(folder)) as scraping:
            lookers, taken, idle = Lookers(sink, sink.hear()["address"], scraping), list[Taken](), list[Figure]()
            async with lookers.side(OFF, options.model) as off:
                for way in ON:
                    async with lookers.side(way, options.model) as on:
                        taken.append(await _take_turns(off, on, options))
                        idle += [await _idle_figure(side) for side in (off, on) if way is ALL]
            return [*_throughput_figures(taken), *_cpu_figures(taken, scraping.name), *idle]


async def _take_turns(off: Side, on: Side, options: Options) -> Taken:
    """The first of each is not counted: it is slower, whatever is told to whom."""
    size = QUICK_SIZE if options.quick else SIZE
    order = [off, on] * (2 if options.quick else ROUNDS) + [off]
    for number, side in enumerate((off, on)):
        await side.take_turn(jobs(-1 - number, size))
    taken: list[tuple[Way, Turn]] = []
    for number, side in enumerate(order):
        taken.append((side.way, await side.take_turn(jobs(number, size))))
        say(f"turn {number + 1}/{len(order)}  {side.way.name}: {taken[-1][1].tokens_per_s:.1f} tokens/s")
    return taken


def _throughput_figures(taken: Sequence[Taken]) -> list[Figure]:
    off = median(turn.tokens_per_s for each in taken for way, turn in each if way is OFF)
    work = f"SmolLM2-135M, one router, one prefill and one decode worker, {AT_ONCE} requests at a time"
    found = _compared(taken, lambda turn: turn.tokens_per_s)
    return [
        Figure("output tokens per second, off", round(off, 1), "tokens/s", "higher", peer=work),
        *(_ratio_figure("throughput", way, found[way], "higher", GOAL if way in (TRACES, ALL) else None) for way in (OFF, *ON)),
    ]


def _cpu_figures(taken: Sequence[Taken], scraper_name: str) -> list[Figure]:
    """All processes of a mesh, and whoever takes what it tells, together; then each kind."""
    found = _compared(taken, lambda turn: turn.cpu_ms(""))
    turns = {way: [turn for each in taken for its, turn in each if its is way] for way in (OFF, *ON)}
    return [
        *(_ratio_figure("CPU time per request", way, found[way], "lower") for way in turns),
        *(_added_figure(turns[way], turns[OFF], way) for way in ON),
        *(_each_figure(turns[way], way, scraper_name) for way in turns),
    ]


def _added_figure(on: Sequence[Turn], off: Sequence[Turn], way: Way) -> Figure:
    """Without the workers: what their engines take varies more from turn to turn than what telling adds there."""
    added = median(turn.cpu_ms(*TELLING) for turn in on) - median(turn.cpu_ms(*TELLING) for turn in off)
    share = added / median(turn.cpu_ms("") for turn in off)
    name = f"CPU time that {way.name} add in the router and beside the mesh, ÷ all of it, off"
    return Figure(name, round(share, 4), "ratio", "lower", peer=f"{added:.2f} ms per request")


def _ratio_figure(
    name: str, way: Way, found: Sequence[float], better: Literal["higher", "lower"], goal: float | None = None
) -> Figure:
    return Figure(f"{name}, {way.name} ÷ off", round(median(found), 4), "ratio", better, goal=goal, peer=spread(found))


def _each_figure(turns: Sequence[Turn], way: Way, scraper_name: str) -> Figure:
    each = {kind: median(turn.cpu_ms(kind) for turn in turns) for kind in KINDS}
    told = ", ".join(f"{scraper_name if kind == 'scraper' else kind} {ms:.2f}" for kind, ms in each.items() if ms)
    whole = median(turn.cpu_ms("") for turn in turns)
    return Figure(f"CPU time per request, {way.name}", round(whole, 2), "ms", "lower", peer=told)


def _compared(taken: Sequence[Taken], value: Callable[[Turn], float]) -> dict[Way, list[float]]:
    found: dict[Way, list[float]] = {way: [] for way in (OFF, *ON)}
    for each in taken:
        for way, their in ratios([(way, value(turn)) for way, turn in each], OFF).items():
            found[way] += their
    return found


async def _idle_figure(side: Side) -> Figure:
    """What a mesh that waits for its turn takes from the one that works."""
    pids = side.mesh.pids.values()
    before = sum(map(process_cpu_ns, pids))
    await asyncio.sleep(IDLE_S)
    cores = (sum(map(process_cpu_ns, pids)) - before) / 1e9 / IDLE_S
    return Figure(f"a mesh without work, {side.way.name}", round(100 * cores, 2), "% of a core", "lower")
