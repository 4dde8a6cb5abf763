"""Every way in which the same request can be served: each must give the same tokens.

A way returns its outputs with *evidence*: a count that shows that what the way is named after did happen (preemptions,
cached tokens, resubmissions, resumes, bytes of KV). A way without evidence proves nothing, so callers check it too.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.engine_runs import DEFAULT, Draw, Settings, flags_of, make_engine, run, run_alone
from pdmesh.client.client import AsyncClient
from pdmesh.engine.engine import Engine
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from tests.equality import mesh_runs

BLOCK_SIZE = 16
Ask = Callable[..., Awaitable[list[mesh_runs.Stream]]]
"""`mesh_runs.run` with a mesh and its prompts."""


@dataclass(frozen=True)
class Task:
    """What every way is asked. `settings`: the numbers in which engines and workers compute."""

    folder: Path
    prompts: Sequence[Sequence[int]]
    draw: Draw
    num_tokens: int
    settings: Settings = field(default_factory=lambda: DEFAULT)

    def engine(self, **more: object) -> Engine:
        return make_engine(self.folder, **self.settings, **more)

    def mesh(self, *flags: str, num_decode: int = 1, metrics_port: int | None = None) -> LocalMesh:
        """One prefill worker; `flags` are the workers'."""
        flags = (*flags_of(self.settings), *flags)
        config = LocalMeshConfig(
            model=str(self.folder), num_decode=num_decode, port=0, metrics_port=metrics_port, worker_args=flags
        )
        return LocalMesh(config)


@dataclass(frozen=True)
class Outcome:
    """What one way gave: `tokens` per prompt; `evidence` must be positive."""

    way: str
    tokens: list[list[int]]
    evidence: int


def engine_ways(task: Task) -> Iterator[Outcome]:
    """(a) alone, (d) batched, (e) with prefix hits, (f) preempted, all in one engine of this process."""
    params = task.draw.params(task.num_tokens)
    engine = task.engine()
    yield Outcome("engine alone", run_alone(engine, task.prompts, params), engine.stats().num_steps)
    before = engine.stats().num_prefix_hit_tokens
    outputs = run_alone(engine, task.prompts, params)
    yield Outcome("engine with prefix hits", outputs, engine.stats().num_prefix_hit_tokens - before)
    del engine
    engine = task.engine(prefix_caching=False)
    outputs = run(engine, task.prompts, params)
    yield Outcome("engine batched", outputs, sum(map(len, outputs)) - engine.stats().num_steps)
    del engine
    yield _preempted_engine(task)


@dataclass(frozen=True)
class Tight:
    """Some of the prompts with a pool in which their answers cannot all grow at once: sequences have to give way."""

    numbers: list[int]
    num_blocks: int


def tight_groups(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Tight]:
    """Short prompts with a third of the blocks that they would like, long ones with hardly more than the longest needs."""
    needs = [-(-(len(prompt) + num_tokens) // BLOCK_SIZE) for prompt in prompts]
    by_need = sorted(range(len(prompts)), key=lambda number: needs[number])
    middle = len(prompts) * 3 // 4
    short, long = by_need[:middle], by_need[middle:]
    third = sum(needs[number] for number in short) * 35 // 100
    return [Tight(short, max(needs[short[-1]], third)), Tight(long, needs[long[-1]] + 2)]


def _preempted_engine(task: Task) -> Outcome:
    outputs: list[list[int]] = [[] for _ in task.prompts]
    num_preemptions = 0
    for group in tight_groups(task.prompts, task.num_tokens):
        engine = task.engine(num_blocks=group.num_blocks, max_num_batched_tokens=96)
        answers = run(engine, [task.prompts[number] for number in group.numbers], task.draw.params(task.num_tokens))
        for number, answer in zip(group.numbers, answers, strict=True):
            outputs[number] = answer
        num_preemptions += engine.stats().num_preemptions
    return Outcome("engine preempted, small chunks", outputs, num_preemptions)


async def mesh_ways(task: Task) -> AsyncIterator[Outcome]:
    """(b) REMOTE, (c) LOCAL, (d) together, (e) prefix hits, (g) decode worker killed, (h) router killed: real processes."""
    async with task.mesh("--kv-memory-mb", "512", num_decode=2) as mesh:
        routers = mesh.router_addresses
        ask = partial(mesh_runs.run, routers, task.prompts, task.draw, task.num_tokens)
        streams = await ask(mode="remote")
        yield Outcome("mesh REMOTE", mesh_runs.tokens(streams), sum(s.timings.kv_bytes for s in streams if s.timings))
        streams = await ask(mode="local")
        local = sum(s.timings is not None and not s.timings.kv_bytes for s in streams)
        yield Outcome("mesh LOCAL", mesh_runs.tokens(streams), local)
        streams = await ask(together=True)
        yield Outcome("mesh together, with prefix hits", mesh_runs.tokens(streams), sum(s.cached_tokens for s in streams))

        yield await decode_killed(mesh, ask)
        yield await router_killed(mesh, ask)


async def router_killed(mesh: LocalMesh, ask: Ask) -> Outcome:
    """(h) The only router."""

    async def kill_router() -> None:
        mesh.kill("router-0", signal.SIGKILL)

    def num_resumes(streams: Sequence[mesh_runs.Stream]) -> int:
        return sum(stream.num_resumes for stream in streams)

    tokens, evidence = await _until_it_strikes(mesh, ask, kill_router, num_resumes)
    return Outcome("mesh, router killed, client resumes", tokens, evidence)


async def decode_killed(mesh: LocalMesh, ask: Ask) -> Outcome:
    """(g) The busiest one."""

    async def kill_decode() -> None:
        mesh.kill(await _busiest_decode(mesh.router_addresses), signal.SIGKILL)

    def num_resubmissions(streams: Sequence[mesh_runs.Stream]) -> int:
        return sum(stream.timings.num_resubmissions for stream in streams if stream.timings)

    tokens, evidence = await _until_it_strikes(mesh, ask, kill_decode, num_resubmissions)
    return Outcome("mesh, decode worker killed", tokens, evidence)


async def _until_it_strikes(
    mesh: LocalMesh, ask: Ask, blow: Callable[[], Awaitable[None]], count: Callable[[Sequence[mesh_runs.Stream]], int]
) -> tuple[list[list[int]], int]:
    """Return the tokens, and what the blow has caused. Short answers can be over before it falls: then once more."""
    attempts: list[list[list[int]]] = []
    evidence = 0
    while not evidence and len(attempts) < 4:
        streams = await ask(together=True, disturb=blow)
        attempts.append(mesh_runs.tokens(streams))
        evidence = count(streams)
        await mesh.wait_ready(60)
    if any(tokens != attempts[0] for tokens in attempts):
        raise AssertionError("the same prompts, asked again, gave other tokens")
    return attempts[0], evidence


async def _busiest_decode(routers: Sequence[str]) -> str:
    """The decode worker with the most sequences, once the router has heard of any: cached prefixes may have drawn all to one."""
    async with AsyncClient(routers) as client:
        for _ in range(50):
            status = await client.status(timeout=30)
            decodes = [worker for worker in status.workers if worker.alive and worker.info.worker_id.startswith("decode")]
            loads = {worker.info.worker_id: worker.load.num_running + worker.load.num_reserved for worker in decodes}
            if any(loads.values()):
                break
            await asyncio.sleep(0.02)
    return max(loads, key=lambda name: loads[name])


async def preempting_mesh(task: Task) -> Outcome:
    """(f) through the mesh: a decode worker whose pool is too small for all answers at once."""
    outputs: list[list[int]] = [[] for _ in task.prompts]
    num_preemptions = 0
    for group in tight_groups(task.prompts, task.num_tokens):
        async with task.mesh("--num-blocks", str(group.num_blocks)) as mesh:
            chosen = [task.prompts[number] for number in group.numbers]
            streams = await mesh_runs.run(mesh.router_addresses, chosen, task.draw, task.num_tokens, together=True)
            async with AsyncClient(mesh.router_addresses) as client:
                status = await client.status()
        for number, stream in zip(group.numbers, streams, strict=True):
            outputs[number] = stream.token_ids
        num_preemptions += sum(worker.load.num_preemptions for worker in status.workers)
    return Outcome("mesh, preempted", outputs, num_preemptions)
