"""What running streams feel of long prompts that arrive: separated, and beside it one engine on the same two cores.

A few streams run all the time, one after the other in each place. First alone, then while prompts of 2 000 tokens come at a
steady rate, which one prefill worker of this machine can bear. TPOT is a stream's mean time per token; a stream counts to the
time in which it began.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

from benchmarks.engine_runs import prompt
from benchmarks.harness import Figure, Options, beside, say
from benchmarks.router.meshes import MESH, SEPARATED, TWO_CORES, Call, Running, Shape, alone, asking, call, running, warm_up
from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.loadtest.stats import quantile
from pdmesh.loadtest.targets.target import Target

# One of two routers is killed under load. Half of the streams prefer it: they go on at the other one through the client library;
# the other half must not notice. Both halves are compared with the same prompts when nobody was killed.


SHAPE = replace(MESH, key="kill", name="two routers, two one-core workers", num_routers=2, restart=False)
VICTIM = "router-1"
PROMPT_TOKENS, STREAMS_OF_EACH, DISTURB_AFTER = 120, 8, 8


@dataclass
class Followed:
    """One stream as a client saw it. `longest_gap_s` between two messages with tokens."""

    num_resumes: int = 0
    error: str = ""
    completed: bool = False
    longest_gap_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient, ids: Sequence[int], num_tokens: int) -> None:
        try:
            async with client.generate_stream(
                list(ids), max_tokens=num_tokens, temperature=0, ignore_eos=True, timeout=120
            ) as stream:
                last = time.monotonic()
                async for event in stream:
                    if isinstance(event, Delta):
                        self.tokens += event.token_ids
                        last = self._gap(last)
                    elif isinstance(event, Completed):
                        self.num_resumes, self.completed = event.num_resumes, True
        except MeshError as error:
            self.error = f"{error.code.name}: {error.message}"
        finally:
            self.grown.set()

    def _gap(self, last: float) -> float:
        now = time.monotonic()
        if len(self.tokens) > 1:
            self.longest_gap_s = max(self.longest_gap_s, now - last)
        if len(self.tokens) >= DISTURB_AFTER:
            self.grown.set()
        return now


@dataclass(frozen=True)
class Halves:
    """The streams of a run by the router that they prefer."""

    spared: list[Followed]
    struck: list[Followed]


async def _run_killed(mesh: LocalMesh, num_tokens: int, *, kill: bool) -> Halves:
    """All streams at once; with `kill`, the second router is killed when all of its streams are in the middle."""
    first, second = mesh.router_addresses
    halves = Halves([Followed() for _ in range(STREAMS_OF_EACH)], [Followed() for _ in range(STREAMS_OF_EACH)])
    async with AsyncClient((first, second)) as spared, AsyncClient((second, first)) as struck, asyncio.TaskGroup() as group:
        for client, streams, offset in ((spared, halves.spared, 0), (struck, halves.struck, 1000)):
            for number, stream in enumerate(streams):
                group.create_task(stream.run(client, prompt(offset + number, PROMPT_TOKENS), num_tokens))
        if kill:
            await asyncio.gather(*(stream.grown.wait() for stream in halves.struck))
            mesh.kill(VICTIM)
    return halves


def kill_figures_of(reference: Halves, seen: Halves) -> list[Figure]:
    """Pure."""
    same = sum(now.completed and now.tokens == before.tokens for now, before in zip(seen.struck, reference.struck, strict=True))
    spared = sum(now.completed and now.tokens == before.tokens for now, before in zip(seen.spared, reference.spared, strict=True))
    undisturbed = (*reference.spared, *reference.struck)
    fewest = [
        ("requests of the other router: completed with the same tokens", spared, STREAMS_OF_EACH),
        ("streams of the killed router: completed with the same tokens", same, STREAMS_OF_EACH),
        ("streams of the killed router: resumed on the other", sum(one.num_resumes > 0 for one in seen.struck), STREAMS_OF_EACH),
    ]
    most = [
        ("requests of the other router: errors", sum(bool(one.error) for one in seen.spared)),
        ("requests of the other router: resumed", sum(one.num_resumes > 0 for one in seen.spared)),
        ("errors without a kill", sum(bool(one.error) for one in undisturbed)),
    ]
    gaps = [
        ("streams of the killed router: longest pause", max(one.longest_gap_s for one in seen.struck)),
        ("requests of the other router: longest pause", max(one.longest_gap_s for one in seen.spared)),
        ("longest pause without a kill", max(one.longest_gap_s for one in undisturbed)),
    ]
    return [
        *(Figure(f"one of two routers killed: {name}", value, "streams", "higher", goal) for name, value, goal in fewest),
        *(Figure(f"one of two routers killed: {name}", value, "streams", "lower", 0) for name, value in most),
        *(Figure(f"one of two routers killed: {name}", 1e3 * value, "ms", "lower") for name, value in gaps),
    ]


async def kill_figures(options: Options) -> list[Figure]:
    """An undisturbed run, then one in which the second router is killed."""
    num_tokens = int(options.pick(256, 96))
    async with running(SHAPE, options) as system:
        reference = await _run_killed(system.mesh, num_tokens, kill=False)
        seen = await _run_killed(system.mesh, num_tokens, kill=True)
    for one in (*seen.spared, *seen.struck):
        if one.error:
            say(f"kill: {one.error}")
    return kill_figures_of(reference, seen)


STREAMS, STREAM_INPUT, STREAM_OUTPUT, QUICK_OUTPUT = 4, 64, 160, 16
PROMPT, PROMPT_OUTPUT = 2000, 2
PERIOD_TIMES, LEAST_PERIOD_S, BESIDE_S = 1.1, 3.0, 90.0
"""A prompt comes each so many times what one takes beside the streams, separated: nearly what a prefill worker can compute."""
GOAL = 1.3


@dataclass(frozen=True)
class Felt:
    """Of the streams, in seconds: alone (p50) and disturbed (p99)."""

    idle_tpot_p50: float
    idle_itl_p50: float
    tpot_p99: float
    itl_p99: float
    prompt_ttft_p50: float

    @property
    def ratio(self) -> float:
        return self.tpot_p99 / self.idle_tpot_p50


def felt(idle: Sequence[Call], disturbed: Sequence[Call], prompts: Sequence[Call]) -> Felt:
    """Pure. Raises ValueError where one of them has none that was answered."""
    return Felt(
        _quantile([one.tpot_s for one in idle if one.tpot_s], 0.5),
        _quantile(_gaps(idle), 0.5),
        _quantile([one.tpot_s for one in disturbed if one.tpot_s], 0.99),
        _quantile(_gaps(disturbed), 0.99),
        _quantile([one.ttft_s for one in prompts if math.isfinite(one.ttft_s)], 0.5),
    )


def _gaps(calls: Sequence[Call]) -> list[float]:
    return [later - earlier for one in calls for earlier, later in pairwise(one.times)]


def _quantile(values: Sequence[float], q: float) -> float:
    if not values:
        raise ValueError("no stream was answered: the window is too short, or the mesh does not serve")
    return quantile(sorted(values), q)


async def _streams(target: Target, seconds: float, num_output: int, tag: str) -> list[Call]:
    """Keeps STREAMS of them running for so long; returns all, the last ones to their end."""
    calls: list[Call] = []
    until = asyncio.get_running_loop().time() + seconds

    async def place(number: int) -> None:
        for turn in count():
            if asyncio.get_running_loop().time() >= until:
                return
            calls.append(await call(target, f"{tag}-{number}-{turn}", STREAM_INPUT, num_output, seed=7))

    await asyncio.gather(*(place(number) for number in range(STREAMS)))
    return calls


async def _prompts(target: Target, period_s: float, into: list[Call]) -> None:
    """One every period, whatever became of those before, until it is cancelled."""

    async def one(number: int) -> None:
        into.append(await call(target, f"prompt-{number}", PROMPT, PROMPT_OUTPUT, seed=8))

    async with asyncio.TaskGroup() as group:
        for number in count():
            group.create_task(one(number))
            await asyncio.sleep(period_s)


async def _disturbed(
    streams: Target, prompts: Target, period_s: float, seconds: float, num_output: int
) -> tuple[list[Call], list[Call]]:
    answered: list[Call] = []
    async with beside(_prompts(prompts, period_s, answered)):
        return await _streams(streams, seconds, num_output, "disturbed"), answered


async def _measure(system: Running, mode: str, period_s: float | None, options: Options) -> tuple[Felt, float]:
    """Return it with the period of the long prompts, in seconds; None: what follows from single ones. `mode`: of the prompts."""
    num_output = int(options.pick(STREAM_OUTPUT, QUICK_OUTPUT))
    async with asking(system.mesh, mode=mode) as prompts:
        await warm_up(system.target, options.pick(5.0, 1.0))
        await warm_up(prompts, options.pick(3.0, 1.0))
        if period_s is None:
            async with beside(_streams(system.target, BESIDE_S, num_output, "beside")):
                took_s, _ = await alone(prompts, PROMPT, PROMPT_OUTPUT, seed=9)
            period_s = max(LEAST_PERIOD_S, PERIOD_TIMES * took_s)
        idle = await _streams(system.target, options.pick(25.0, 3.0), num_output, "idle")
        seconds = options.pick(max(75.0, 12 * period_s), 7.0)
        disturbed, answered = await _disturbed(system.target, prompts, period_s, seconds, num_output)
    result = felt(idle, disturbed, answered)
    say(f"{system.shape.name}: TPOT p99 {result.ratio:.3g} times its idle p50; {len(disturbed)} streams, {len(answered)} prompts")
    return result, period_s


def _figures_of(shape: Shape, seen: Felt, goal: float | None) -> list[Figure]:
    while_prompts = f"{shape.name}: while {PROMPT}-token prompts arrive"
    return [
        Figure(f"{while_prompts}: TPOT p99 of running streams over their idle p50", seen.ratio, "times", "lower", goal),
        Figure(f"{while_prompts}: ITL p99 over idle p50", seen.itl_p99 / seen.idle_itl_p50, "times", "lower"),
        Figure(f"{while_prompts}: TPOT p99", 1e3 * seen.tpot_p99, "ms", "lower"),
        Figure(f"{while_prompts}: TTFT p50 of those prompts", 1e3 * seen.prompt_ttft_p50, "ms", "lower"),
        Figure(f"{shape.name}: idle TPOT p50, {STREAMS} streams", 1e3 * seen.idle_tpot_p50, "ms", "lower"),
    ]


async def figures(options: Options) -> list[Figure]:
    """Separated, then aggregated with as many prompts."""
    async with running(SEPARATED, options) as system:
        separated, period_s = await _measure(system, "remote", None, options)
    async with running(TWO_CORES, options) as system:
        aggregated, _ = await _measure(system, "local", period_s, options)
    return [
        *_figures_of(SEPARATED, separated, GOAL),
        *_figures_of(TWO_CORES, aggregated, None),
        Figure(f"{PROMPT}-token prompts arrive each", period_s, "s", "lower"),
    ]
