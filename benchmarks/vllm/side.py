"""Side by side, on the same cores: plain vLLM, SMG with two vLLM over NIXL, pdmesh with two vLLM separated, pdmesh with one.

Eight of the mixes of `make bench-router`, at rates and with objectives that plain vLLM sets: a share of what it bears in a closed
loop, and multiples of what one request alone takes there. One system runs at a time. Each value is measured once and kept, so
that a run that was stopped goes on.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.capacity.probes import not_answering
from benchmarks.engine_runs import prompt
from benchmarks.harness import MODEL, Figure, Kept, Options, say
from benchmarks.peers import systems
from benchmarks.peers.environments import PeerError
from benchmarks.router.disturbances import Followed
from benchmarks.router.meshes import alone, closed_loop, load_of, warm_up, window
from benchmarks.router.mixes import MIXES, Cell, Idle, Kind, Mix, book_of, ratio
from benchmarks.vllm.answers import EAGER, ENGINE, Settings, absent
from benchmarks.vllm.strikes import back, strike
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Timings
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import engine_python
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.target import Target, TargetError
from pdmesh.runtime.child import StartFailed

CHOSEN = tuple(MIXES[number] for number in (1, 2, 3, 4, 6, 7, 8, 12))
QUICK_CHOSEN = (MIXES[3],)
MAX_CONTEXT = 4096
CONCURRENCY = 8
CLOSED_S, SHORTEST_S, LONGEST_S, WARMUP_S, WANTED_REQUESTS = 12.0, 18.0, 36.0, 3.0, 20
SETTLE_S = 60.0
SEED = 7

PLAIN, SMG, SEPARATED, ONE = "plain vLLM", "SMG + two vLLM over NIXL", "pdmesh + two vLLM separated", "pdmesh + one vLLM"
GOAL, GOAL_SMG = 0.98, 2.0

LENGTHS = (1000, 4000)
ROUNDS = 5
EXPOSED_GOAL = 0.05
STALL_GOAL_S = 2.0
STALL_PROMPT, STALL_TOKENS, STALL_AFTER = 400, 96, 16


# The systems.


Start = Callable[[], AbstractAsyncContextManager[Target]]


def settings_of(options: Options, threads: int) -> Settings:
    """Return a worker's settings: vLLM's defaults, compiled as plain vLLM is; in short runs eager."""
    return Settings(options.model, "bfloat16", threads, kv_memory_mb=2048, vllm_args=(EAGER,) if options.quick else ())


@asynccontextmanager
async def mesh(options: Options, num_prefill: int = 0, num_decode: int = 0, num_both: int = 0) -> AsyncIterator[Target]:
    """A mesh whose workers share the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // (num_prefill + num_decode + num_both))
    shape: dict[str, Any] = {"num_prefill": num_prefill, "num_decode": num_decode, "num_both": num_both}
    config = replace(settings_of(options, threads).mesh(bind_cpus=True, **shape), model_name=MODEL)
    async with LocalMesh(config, on_event=say) as running:
        target = GrpcTarget(",".join(running.router_addresses), GrpcSettings(prompt="words"))
        try:
            yield target
        finally:
            await target.close()


def systems_of(options: Options) -> dict[str, Start]:
    """Return how each is started; plain vLLM, which sets the rates, is the first."""
    return {
        PLAIN: lambda: systems.vllm(Path(engine_python(ENGINE, "cpu")), MAX_CONTEXT),
        SEPARATED: partial(mesh, options, num_prefill=1, num_decode=1),
        ONE: partial(mesh, options, num_both=1),
        SMG: partial(systems.smg, MAX_CONTEXT),
    }


# Windows.


@dataclass
class Side:
    """The windows of one system; it is started when the first one that is not known is due, and anew when it is stuck."""

    name: str
    start: Start
    options: Options
    kept: Kept
    num_stuck: int = 0

    async def measure(self, mixes: Sequence[Mix]) -> None:
        """Measure what is not known yet. Raises PeerError, StartFailed, TargetError or OSError where it does not serve."""
        while left := [mix for mix in mixes if self.kept.get(self._key(mix)) is None]:
            say(f"{self.name}: starting")
            async with self.start() as target:
                await target.check()
                await warm_up(target, self.options.pick(6.0, 1.0))
                await self._until_stuck(target, left)

    async def _until_stuck(self, target: Target, mixes: Sequence[Mix]) -> None:
        for mix in mixes:
            if self.name == PLAIN:
                await self._set_rate(target, mix)
            await self._cell(target, mix)
            if (reason := await not_answering(target, SETTLE_S)) is not None:
                say(f"{self.name}: is stuck after this window ({reason}); it is started anew")
                self.num_stuck += 1
                return

    async def _set_rate(self, target: Target, mix: Mix) -> None:
        for kind in mix.kinds:
            if self.kept.get(_idle_key(kind)) is None:
                self.kept.put(_idle_key(kind), await alone(target, kind.num_input, kind.num_output, SEED))
        if self.kept.get(_rate_key(mix)) is None:
            seconds = self.options.pick(CLOSED_S, 3.0)
            rate, _ = await closed_loop(target, mix.lengths, CONCURRENCY, seconds, mix.seed)
            self.kept.put(_rate_key(mix), rate)
            say(f"{mix.name}: {self.name} bears {rate:.3g} requests/s")

    async def _cell(self, target: Target, mix: Mix) -> None:
        capacity, idle = self._known(_rate_key(mix)), {kind.name: Idle(*self._known(_idle_key(kind))) for kind in mix.kinds}
        wanted_s = min(LONGEST_S, max(SHORTEST_S, WANTED_REQUESTS / (mix.load * capacity)))
        duration_s, warmup_s = self.options.pick(wanted_s, 4.0), self.options.pick(WARMUP_S, 1.0)
        load = load_of(mix.workload(capacity), book_of(mix, idle), mix.seed, duration_s, warmup_s)
        seen = (await window(target, load)).summary
        cell = Cell(seen.request_rate, seen.goodput, seen.attainment or 0.0, seen.ttft.p50, seen.tpot.p99, seen.num_requests)
        self.kept.put(self._key(mix), asdict(cell))
        say(f"{mix.name}: {self.name}: {cell.goodput:.3g} of {cell.offered:.3g} requests/s good, {seen.errors or 'no errors'}")

    def _known(self, name: str) -> Any:
        value = self.kept.get(name)
        assert value is not None, f"plain vLLM has not set {name}"
        return value

    def _key(self, mix: Mix) -> str:
        return f"cell-{self.name}-{mix.key}".replace(" ", "-")

    def cells(self, mixes: Sequence[Mix]) -> dict[Mix, Cell]:
        """Return what is known."""
        return {mix: Cell(**known) for mix in mixes if (known := self.kept.get(self._key(mix))) is not None}


def _idle_key(kind: Kind) -> str:
    return f"idle-{kind.name}"


def _rate_key(mix: Mix) -> str:
    return f"rate-{'_'.join(kind.name for kind in mix.kinds)}"


# Hand-off and loss.


async def exposed_shares(options: Options) -> dict[int, float | None]:
    """Return by length of prompt how much of a hand-off is exposed, as a share of its prefill; medians of unlike prompts."""
    config, rounds = settings_of(options, 1).mesh(bind_cpus=True), int(options.pick(ROUNDS, 1))
    shares = dict[int, float | None]()
    async with LocalMesh(config, on_event=say) as running, AsyncClient(running.router_addresses) as client:
        await _timings(client, prompt(99, 200))
        for length in LENGTHS:
            found = [await _timings(client, prompt(turn + length, length)) for turn in range(rounds)]
            shares[length] = exposed_share(found)
            say(f"{length} tokens: exposed {shares[length]} of prefill, {[each.kv_bytes for each in found]} bytes")
    return shares


def exposed_share(found: Sequence[Timings]) -> float | None:
    """Return the median over requests that were handed off; None where none was. Pure."""
    shares = [each.kv_exposed_ns / each.prefill_compute_ns for each in found if each.kv_bytes]
    return statistics.median(shares) if shares else None


async def _timings(client: AsyncClient, ids: Sequence[int]) -> Timings:
    answer = await client.generate(list(ids), temperature=0, max_tokens=8, ignore_eos=True, mode="remote", timeout=120)
    return answer.timings


async def stalls(options: Options) -> list[tuple[float, float]]:
    """Return, for some kills of the decode worker that answers, the longest gap between tokens and the time of the prefill of
    the prompt alone, in seconds. Raises RuntimeError where an answer fails."""
    config = settings_of(options, 1).mesh(num_decode=2)
    async with LocalMesh(config, on_event=say) as running, AsyncClient(running.router_addresses) as client:
        await _timings(client, prompt(98, STALL_PROMPT))
        return [await _stall(running, client, turn) for turn in range(int(options.pick(3, 1)))]


async def _stall(running: LocalMesh, client: AsyncClient, turn: int) -> tuple[float, float]:
    prefill_s = (await _timings(client, prompt(200 + turn, STALL_PROMPT))).ttft_ns / 1e9
    followed = Followed()
    asked = asyncio.create_task(followed.run(client, prompt(300 + turn, STALL_PROMPT), STALL_TOKENS))
    while len(followed.tokens) < STALL_AFTER and not asked.done():  # noqa: ASYNC110  # the client library grows them
        await asyncio.sleep(0.005)
    struck = await strike(running, client, "decode")
    await asked
    if followed.error or len(followed.tokens) != STALL_TOKENS:
        raise RuntimeError(f"an answer whose decode worker was killed failed: {followed.error or 'tokens are missing'}")
    say(f"decode killed: a gap of {followed.longest_gap_s:.2f} s; prefill takes {prefill_s:.2f} s")
    await back(running, struck)
    return followed.longest_gap_s, prefill_s


# Figures. Pure.


def ratio_figures(cells: Mapping[str, Mapping[Mix, Cell]], mixes: Sequence[Mix]) -> Iterator[Figure]:
    """Yield every system's goodput under each mix, and the better of pdmesh's over the better of the others'."""
    for mix in mixes:
        known = {name: of[mix] for name, of in cells.items() if mix in of}
        for name, cell in known.items():
            yield Figure(f"{mix.name}: {name}: goodput of {cell.offered:.3g}", cell.goodput, "requests/s", "higher")
        ours = max((known[name].goodput for name in (SEPARATED, ONE) if name in known), default=None)
        theirs = [known[name] for name in (PLAIN, SMG) if name in known]
        if ours is not None and theirs:
            yield _over(mix, ours, theirs, "the better of plain vLLM and SMG", GOAL)
        if ours is not None and SMG in known and known[SMG].goodput:
            yield _over(mix, ours, [known[SMG]], SMG, GOAL_SMG)


def _over(mix: Mix, ours: float, theirs: Sequence[Cell], peer: str, goal: float) -> Figure:
    value = ratio(ours, [cell.goodput for cell in theirs], max(cell.of_one for cell in theirs))
    shown = "no answer was in time" if value is None else value
    is_bound = value is not None and not any(cell.goodput for cell in theirs)
    against = f"{peer}, which kept nothing, taken as one request: at least so much" if is_bound else peer
    return Figure(f"{mix.name}: pdmesh over {peer}", shown, "times", "higher", goal, peer=against)


def exposed_figures(shares: Mapping[int, float | None]) -> list[Figure]:
    """Return them by length of prompt."""
    named = {f"hand-off exposed after a prefill of {length} tokens": share for length, share in shares.items()}
    unit, none = "share of prefill", "absent: no prompt was handed off, prefill was given up for late"
    return [Figure(name, none if share is None else share, unit, "lower", EXPOSED_GOAL) for name, share in named.items()]


def stall_figure(found: Sequence[tuple[float, float]]) -> Figure:
    """Return the longest stall beyond a prefill."""
    value = max(gap_s - prefill_s for gap_s, prefill_s in found)
    name = f"SIGKILL of decode: longest stall of {len(found)}, beyond a prefill"
    return Figure(name, value, "s", "lower", goal=STALL_GOAL_S)


# The part.


async def measure(options: Options) -> list[Figure]:
    """Measure all of it; what a system cannot do is absent with the reason."""
    kept, mixes = Kept(options.folder / "side"), QUICK_CHOSEN if options.quick else CHOSEN
    missing, cells = list[Figure](), dict[str, dict[Mix, Cell]]()
    for name, start in systems_of(options).items():
        side = Side(name, start, options, kept)
        try:
            await side.measure(mixes)
        except (PeerError, StartFailed, TargetError, OSError, RuntimeError) as error:
            if name == PLAIN:
                raise
            missing.append(absent(f"{name}: goodput", str(error), "requests/s"))
        cells[name] = side.cells(mixes)
        missing.append(Figure(f"{name}: times that it was stuck after a window", side.num_stuck, "times", "lower"))
    figures = [*ratio_figures(cells, mixes), *missing, *await _measured_alone(options, kept)]
    kept.forget()
    return figures


async def _measured_alone(options: Options, kept: Kept) -> list[Figure]:
    if (shares := kept.get("exposed")) is None:
        shares = [[length, share] for length, share in (await exposed_shares(options)).items()]
        kept.put("exposed", shares)
    if (found := kept.get("stalls")) is None:
        found = await stalls(options)
        kept.put("stalls", found)
    return [*exposed_figures(dict(shares)), stall_figure(found)]
