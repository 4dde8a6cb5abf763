"""Three times the capacity for five minutes: what was admitted keeps its objectives, the rest is refused, nobody is pushed out.

First the capacity: the highest rate at which 95 % keep their objectives (the rule of the mixes, of one request alone on this
mesh). Then three times that; then two tenants, of whom one floods and the other asks for less than its fair share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.harness import Figure, Options, beside, resident_bytes, say
from benchmarks.router.meshes import MESH, WARMUP_S, Running, Seen, alone, load_of, running, warm_up, window
from benchmarks.router.mixes import Idle, objectives
from pdmesh.loadtest.arrivals import Distribution, fixed
from pdmesh.loadtest.measure import Search, Trial, find_capacity
from pdmesh.loadtest.record import ObjectiveBook
from pdmesh.loadtest.stats import quantile, summarise
from pdmesh.loadtest.workload import Arrivals, Limits, TrafficClass, Workload
from tests.soak.samples import line

INPUT_TOKENS, OUTPUT_TOKENS, SEED = 420, 64, 61
ATTAINMENT, TIMES = 0.95, 3.0
# Shares of the capacity: the fair share of two tenants is half of it.
MODEST, FLOOD_TIMES = 0.3, 10.0
RSS_GOAL_MIB = 32.0
SAMPLE_PERIOD_S = 2.0


@dataclass(frozen=True)
class Memory:
    """Of a process, in MiB: at its highest, and by how much it grew over the second half of the time, along a line."""

    peak: float
    growth: float


def memory_of(times_s: Sequence[float], mib: Sequence[float]) -> Memory:
    """Pure. Raises ValueError without samples."""
    if not mib:
        raise ValueError("the router's memory was not sampled: the window is too short")
    half = len(mib) // 2
    slope, _ = line(times_s[half:], mib[half:])
    return Memory(max(mib), slope * (times_s[-1] - times_s[half]))


@dataclass(frozen=True)
class Found:
    """Requests per second."""

    rate: float
    goodput: float


def workload(rate: float, classes: Sequence[TrafficClass] = ()) -> Workload:
    """Requests of about INPUT_TOKENS; by these classes, or all of one."""
    return Workload(arrivals=Arrivals(rate=rate), classes=tuple(classes) or (_traffic(),), limits=Limits(max_input_tokens=720))


def _traffic(tenant: str = "", share: float = 1.0) -> TrafficClass:
    prompt = Distribution("normal", (INPUT_TOKENS, 100))
    return TrafficClass(tenant or "standard", share, tenant=tenant, input_tokens=prompt, output_tokens=fixed(OUTPUT_TOKENS))


def tenants(capacity: float) -> Workload:
    """One asks for a part of its fair share, the other for FLOOD_TIMES that. Pure."""
    modest = MODEST * capacity
    return workload(modest * (1 + FLOOD_TIMES), (_traffic("modest"), _traffic("flooding", FLOOD_TIMES)))


def _tell(trial: Trial) -> None:
    say(f"{trial.rate:.3g} requests/s: {trial.attainment:.0%} keep their objectives")


async def _capacity(system: Running, book: ObjectiveBook, options: Options) -> Found:
    """Raises RuntimeError if not even the lowest rate holds."""
    search = Search(
        ATTAINMENT, first_rate=1.0, max_rate=options.pick(64.0, 4.0), min_rate=0.2, tolerance=options.pick(0.1, 0.9), windows=1
    )
    load = load_of(workload(1.0), book, SEED, options.pick(24.0, 4.0), options.pick(WARMUP_S, 1.0))
    capacity = (await find_capacity(system.target, load, (search,), on_trial=_tell)).capacities[0]
    if capacity.rate is None or capacity.goodput is None:
        if not options.quick:
            raise RuntimeError(f"at no rate down to {search.min_rate:g} requests/s do {ATTAINMENT:.0%} keep their objectives")
        return Found(1.0, 1.0)
    return Found(capacity.rate, capacity.goodput)


@asynccontextmanager
async def _watched(pid: int) -> AsyncIterator[tuple[list[float], list[float]]]:
    """Times in seconds, and the resident memory of the process then, in MiB."""
    times_s: list[float] = []
    mib: list[float] = []

    async def sample() -> None:
        clock = asyncio.get_running_loop().time
        while True:
            times_s.append(clock())
            mib.append(resident_bytes(pid) / 2**20)
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async with beside(sample()):
        yield times_s, mib


def overload_figures(capacity: Found, seen: Seen, memory: Memory) -> list[Figure]:
    """Pure."""
    summary, refusals = seen.summary, seen.refusals_s
    late = 1e3 * quantile(refusals, 0.99) if refusals else "none was refused"
    title = f"{TIMES:g}x overload"
    return [
        Figure(f"capacity: {ATTAINMENT:.0%} keep their objectives", capacity.rate, "requests/s", "higher"),
        Figure(f"{title}: goodput over that at capacity", summary.goodput / capacity.goodput, "times", "higher", 0.9),
        Figure(f"{title}: admitted requests that kept their objectives", seen.admitted_attainment, "share", "higher", 0.95),
        Figure(f"{title}: refusal p99, from when it was sent", late, "ms", "lower", 20.0),
        Figure(f"{title}: refused", len(refusals) / max(1, summary.num_requests), "share", "lower"),
        Figure(f"{title}: offered", summary.request_rate, "requests/s", "higher"),
        Figure(f"{title}: router's memory, growth over the second half", memory.growth, "MiB", "lower", RSS_GOAL_MIB),
        Figure(f"{title}: router's memory, highest", memory.peak, "MiB", "lower"),
        Figure(
            f"{title}: other errors", sum(summary.outcomes.get(key, 0) for key in ("error", "timeout")), "requests", "lower", 0
        ),
    ]


def tenant_figures(seen: Seen) -> list[Figure]:
    """Pure. The modest tenant's answers count as completed when they kept their objectives."""
    title = f"one tenant floods ({FLOOD_TIMES:g} times the other's rate)"
    of = {
        name: summarise([record for record in seen.records if record.tenant == name], seen.window, seen.book)
        for name in ("modest", "flooding")
    }
    complete = of["modest"].outcomes.get("ok", 0) / max(1, of["modest"].num_requests)
    return [
        Figure(f"{title}: the other's requests that were completed", complete, "share", "higher", 0.97),
        Figure(f"{title}: the other's that kept their objectives", of["modest"].attainment or 0.0, "share", "higher", 0.97),
        Figure(f"{title}: the other's goodput", of["modest"].goodput, "requests/s", "higher", limit=of["modest"].request_rate),
        Figure(f"{title}: its own goodput", of["flooding"].goodput, "requests/s", "higher", limit=of["flooding"].request_rate),
    ]


async def figures(options: Options) -> list[Figure]:
    """Capacity, overload, tenants; on one mesh."""
    async with running(MESH, options) as system:
        await warm_up(system.target, options.pick(6.0, 1.0))
        book = ObjectiveBook(objectives(Idle(*await alone(system.target, INPUT_TOKENS, OUTPUT_TOKENS, SEED))))
        say(f"overload: objectives {book.common}")
        found = await _capacity(system, book, options)
        rate = TIMES * found.rate
        say(f"overload: capacity {found.rate:.3g} requests/s; now {rate:.3g}")
        load = load_of(workload(rate), book, SEED + 1, options.pick(300.0, 8.0), options.pick(WARMUP_S, 1.0))
        async with _watched(system.mesh.member("router-0").pid) as (times_s, mib):
            seen = await window(system.target, load)
        flood = load_of(tenants(found.rate), book, SEED + 2, options.pick(60.0, 6.0), options.pick(WARMUP_S, 1.0))
        shared = await window(system.target, flood)
    return [*overload_figures(found, seen, memory_of(times_s, mib)), *tenant_figures(shared)]
