"""The meshes that are measured: how each is shaped, and how it is asked."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from benchmarks.harness import MODEL, PLAIN_FLAGS, Options, say
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.loadtest.measure import Measurement, decided_s
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome, Record
from pdmesh.loadtest.runner import Runner, RunSettings
from pdmesh.loadtest.stats import Summary, Window, met, summarise
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.target import Ask, Said, Target, TargetError, Tokens
from pdmesh.loadtest.workload import PlannedSession, Segment, TrafficClass, Workload, plan


@dataclass(frozen=True)
class Shape:
    """Processes and how the router decides. `mode`: forced on every request ("local": nothing is separated); empty: the policy
    chooses. Each worker's engine gets cores of its own, as many as there are for each, and with `lend_cores` others' idle ones.
    `kv_memory_mb` of each worker. `speculates`: as the engine does by default; else one token of a sequence in each step."""

    key: str
    name: str
    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 0
    num_routers: int = 1
    policy: str = "predict"
    mode: str = ""
    kv_memory_mb: int = 1536
    worker_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    restart: bool = True
    lend_cores: bool = True
    speculates: bool = False

    def config(self, options: Options) -> LocalMeshConfig:
        plain = () if self.speculates else PLAIN_FLAGS
        return LocalMeshConfig(
            model=str(options.model),
            model_name=MODEL,
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            num_both=self.num_both,
            num_routers=self.num_routers,
            port=0,
            bind_cpus=True,
            lend_cores=self.lend_cores,
            restart=self.restart,
            log_dir=str(options.folder / "logs" / self.key),
            worker_args=("--kv-memory-mb", str(self.kv_memory_mb), *plain, *self.worker_args),
            router_args=("--policy", self.policy, *self.router_args),
        )


MESH = Shape("mesh", "pdmesh, two one-core workers", num_both=2)
# What is compared with fills its steps, as chunked prefill does: nobody there knows what was promised.
FULL_STEPS = ("--no-keep-pace",)
TWO_CORES = Shape(
    "two-cores",
    "one two-core engine, aggregated",
    num_both=1,
    policy="round-robin",
    mode="local",
    kv_memory_mb=3072,
    worker_args=FULL_STEPS,
)
TWO_ENGINES = Shape(
    "two-engines", "two one-core engines, aggregated", num_both=2, policy="least-loaded", mode="local", worker_args=FULL_STEPS
)
SEPARATED = Shape("separated", "separated: one prefill worker, one decode worker", num_prefill=1, num_decode=1)


@dataclass(frozen=True)
class Running:
    """A mesh that is ready. `target` asks as the shape says."""

    shape: Shape
    mesh: LocalMesh
    target: GrpcTarget


@asynccontextmanager
async def running(shape: Shape, options: Options) -> AsyncIterator[Running]:
    """Starts it, and ends all of its processes. Raises StartFailed."""
    say(f"{shape.name}: starting")
    async with LocalMesh(shape.config(options), on_event=say) as mesh, asking(mesh, mode=shape.mode) as target:
        yield Running(shape, mesh, target)


@asynccontextmanager
async def asking(mesh: LocalMesh, *, mode: str = "") -> AsyncIterator[GrpcTarget]:
    """Asks all routers, in `mode`."""
    target = GrpcTarget(",".join(mesh.router_addresses), GrpcSettings(mode=mode))
    try:
        yield target
    finally:
        await target.close()


def with_policy(shape: Shape, policy: str) -> Shape:
    """The same under another policy."""
    return replace(shape, key=f"{shape.key}-{policy}", name=f"{shape.name}, {policy}", policy=policy)


# Load on a target, and what came of it: one request alone, a closed loop that keeps it busy, an open-loop window.


TIMEOUT_S = 120.0
CLOSED_TIMEOUT_S = 600.0
"""Where a client keeps as many long prompts running as a slow machine computes in minutes."""
WARMUP_S = 4.0


@dataclass(frozen=True)
class Seen:
    """What became of a window's requests."""

    records: Sequence[Record]
    window: Window
    book: ObjectiveBook

    @property
    def counted(self) -> list[Record]:
        return [record for record in self.records if self.window.holds(record)]

    @property
    def summary(self) -> Summary:
        return summarise(self.records, self.window, self.book)

    @property
    def admitted_attainment(self) -> float:
        """Share of those that were not refused that kept their objectives; 0 where all were refused."""
        admitted = [record for record in self.counted if record.outcome is not Outcome.REFUSED]
        kept = sum(bool(met(record, self.book.of(record.traffic_class))) for record in admitted)
        return kept / len(admitted) if admitted else 0.0

    @property
    def refusals_s(self) -> list[float]:
        """How long each refusal took, from when it was sent."""
        return sorted(record.end_s - record.sent_s for record in self.counted if record.outcome is Outcome.REFUSED)


async def window(target: Target, load: Measurement, sessions: Iterable[PlannedSession] | None = None) -> Seen:
    """Runs a window to its end: until nothing that still runs could be good. `sessions`: None, those of the load's workload."""
    total_s = load.warmup_s + load.duration_s
    settings = replace(
        load.run,
        timeout_s=TIMEOUT_S,
        stop_turns_s=total_s,
        give_up_s=min(decided_s(load), total_s + TIMEOUT_S),
        request_id_prefix=f"{load.run.request_id_prefix}-{load.seed}",
        seed=load.seed,
        book=load.book,
    )
    log = await Runner(target, settings).run(plan(load.workload, load.seed, total_s) if sessions is None else sessions)
    return Seen(log.records, Window(load.warmup_s, total_s), load.book)


def load_of(
    workload: Workload, objectives: ObjectiveBook, seed: int, duration_s: float, warmup_s: float = WARMUP_S
) -> Measurement:
    """A window of it. Its own delay is part of the latencies and does not void it: all that is compared shares its cores."""
    return Measurement(workload, objectives, seed, duration_s, warmup_s, RunSettings(request_id_prefix="bench"), math.inf)


@dataclass(frozen=True)
class Call:
    """One request: when it was sent and when its messages came, by this process's clock (s). `error`: empty, all went well."""

    sent_s: float
    times: Sequence[float] = field(default=())
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent_s if self.times else math.inf

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 below two messages."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if len(self.times) > 1 else 0.0


async def call(
    target: Target,
    name: str,
    num_input: int,
    num_output: int,
    seed: int,
    objectives: Objectives | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Call:
    """Asks once, with a prompt that nobody else has."""
    said = (Said((Segment(name, num_input),)),)
    ask = Ask(f"{name}-{seed}", seed, TrafficClass(), said, num_output, timeout_s, objectives or Objectives())
    prepared, sent_s = target.prepare(ask), time.monotonic()
    times: list[float] = []
    num_tokens = 0
    try:
        async with aclosing(target.stream(prepared)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    times.append(time.monotonic())
                    num_tokens += event.count
    except TargetError as error:
        return Call(sent_s, times, num_tokens, error.message)
    return Call(sent_s, times, num_tokens)


async def alone(target: Target, num_input: int, num_output: int, seed: int, rounds: int = 3) -> tuple[float, float]:
    """Median TTFT and TPOT, in seconds, of requests one after the other. Raises RuntimeError where one fails."""
    names = [f"alone-{num_input}-{num_output}-{turn}" for turn in range(rounds)]
    calls = _good([await call(target, name, num_input, num_output, seed) for name in names])
    return statistics.median(one.ttft_s for one in calls), statistics.median(one.tpot_s for one in calls)


def _good(calls: list[Call]) -> list[Call]:
    if failed := next((one.error for one in calls if one.error), ""):
        raise RuntimeError(f"a request without other load, or with little, failed: {failed}")
    return calls


async def closed_loop(
    target: Target, lengths: Sequence[tuple[int, int]], concurrency: int, seconds: float, seed: int
) -> tuple[float, list[Call]]:
    """Keeps so many requests running until `seconds` are over and waits for the last: requests per second, and all of them."""
    started, calls = time.monotonic(), list[Call]()

    async def one_after_the_other(number: int) -> None:
        turn = number
        while time.monotonic() - started < seconds:
            num_input, num_output = lengths[turn % len(lengths)]
            name = f"closed-{number}-{turn}"
            calls.append(await call(target, name, num_input, num_output, seed, timeout_s=CLOSED_TIMEOUT_S))
            turn += 1

    await asyncio.gather(*(one_after_the_other(number) for number in range(concurrency)))
    return len(_good(calls)) / (time.monotonic() - started), calls


async def warm_up(target: Target, seconds: float) -> None:
    """A little load, of prompts that come again nowhere."""
    await closed_loop(target, [(200, 32)], 4, seconds, seed=999)
