"""Every way in which the same request can be served: each must give the same tokens.

A way returns its outputs with *evidence*: a count that shows that what the way is named after did happen (preemptions,
cached tokens, resubmissions, resumes, bytes of KV). A way without evidence proves nothing, so callers check it too.
"""

import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import mesh_runs
from benchmarks.engine_runs import Draw, make_engine, run, run_alone
from pdmesh.client import AsyncClient
from pdmesh.launcher import LocalMesh
from pdmesh.launcher_plan import LocalMeshConfig

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Outcome:
    """What one way gave: `tokens` per prompt; `evidence` must be positive."""

    way: str
    tokens: list[list[int]]
    evidence: int


def engine_ways(folder: Path, prompts: Sequence[Sequence[int]], draw: Draw, num_tokens: int) -> Iterator[Outcome]:
    """(a) alone, (d) batched, (e) with prefix hits, (f) preempted, all in one engine of this process."""
    params = draw.params(num_tokens)
    engine = make_engine(folder)
    yield Outcome("engine alone", run_alone(engine, prompts, params), engine.stats().num_steps)
    before = engine.stats().num_prefix_hit_tokens
    yield Outcome("engine with prefix hits", run_alone(engine, prompts, params), engine.stats().num_prefix_hit_tokens - before)
    del engine
    engine = make_engine(folder, prefix_caching=False)
    outputs = run(engine, prompts, params)
    yield Outcome("engine batched", outputs, sum(map(len, outputs)) - engine.stats().num_steps)
    del engine
    yield _preempted_engine(folder, prompts, draw, num_tokens)


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


def _preempted_engine(folder: Path, prompts: Sequence[Sequence[int]], draw: Draw, num_tokens: int) -> Outcome:
    outputs: list[list[int]] = [[] for _ in prompts]
    num_preemptions = 0
    for group in tight_groups(prompts, num_tokens):
        engine = make_engine(folder, num_blocks=group.num_blocks, max_num_batched_tokens=96)
        answers = run(engine, [prompts[number] for number in group.numbers], draw.params(num_tokens))
        for number, answer in zip(group.numbers, answers, strict=True):
            outputs[number] = answer
        num_preemptions += engine.stats().num_preemptions
    return Outcome("engine preempted, small chunks", outputs, num_preemptions)


async def mesh_ways(folder: Path, prompts: Sequence[Sequence[int]], draw: Draw, num_tokens: int) -> AsyncIterator[Outcome]:
    """(b) REMOTE, (c) LOCAL, (d) together, (e) prefix hits, (g) decode worker killed, (h) router killed: real processes."""
    config = LocalMeshConfig(model=str(folder), num_decode=2, port=0, worker_args=("--kv-memory-mb", "512"))
    async with LocalMesh(config) as mesh:
        routers = mesh.router_addresses
        streams = await mesh_runs.run(routers, prompts, draw, num_tokens, mode="remote")
        yield Outcome("mesh REMOTE", mesh_runs.tokens(streams), sum(s.timings.kv_bytes for s in streams if s.timings))
        streams = await mesh_runs.run(routers, prompts, draw, num_tokens, mode="local")
        yield Outcome(
            "mesh LOCAL", mesh_runs.tokens(streams), sum(s.timings is not None and not s.timings.kv_bytes for s in streams)
        )
        streams = await mesh_runs.run(routers, prompts, draw, num_tokens, together=True)
        yield Outcome("mesh together, with prefix hits", mesh_runs.tokens(streams), sum(s.cached_tokens for s in streams))

        async def kill_decode() -> None:
            mesh.kill(await _busiest_decode(routers), signal.SIGKILL)

        streams = await mesh_runs.run(routers, prompts, draw, num_tokens, together=True, disturb=kill_decode)
        resubmissions = sum(s.timings.num_resubmissions for s in streams if s.timings)
        yield Outcome("mesh, decode worker killed", mesh_runs.tokens(streams), resubmissions)
        await mesh.wait_ready(60)

        async def kill_router() -> None:
            mesh.kill("router-0", signal.SIGKILL)

        streams = await mesh_runs.run(routers, prompts, draw, num_tokens, together=True, disturb=kill_router)
        yield Outcome("mesh, router killed, client resumes", mesh_runs.tokens(streams), sum(s.num_resumes for s in streams))


async def _busiest_decode(routers: Sequence[str]) -> str:
    """The decode worker with the most sequences: cached prefixes may have drawn all of them to one."""
    async with AsyncClient(routers) as client:
        status = await client.status(timeout=30)
    decodes = [worker for worker in status.workers if worker.alive and worker.info.worker_id.startswith("decode")]
    return max(decodes, key=lambda worker: worker.load.num_running + worker.load.num_reserved).info.worker_id


async def preempting_mesh(folder: Path, prompts: Sequence[Sequence[int]], draw: Draw, num_tokens: int) -> Outcome:
    """(f) through the mesh: a decode worker whose pool is too small for all answers at once."""
    outputs: list[list[int]] = [[] for _ in prompts]
    num_preemptions = 0
    for group in tight_groups(prompts, num_tokens):
        blocks = ("--num-blocks", str(group.num_blocks))
        async with LocalMesh(LocalMeshConfig(model=str(folder), port=0, worker_args=blocks)) as mesh:
            chosen = [prompts[number] for number in group.numbers]
            streams = await mesh_runs.run(mesh.router_addresses, chosen, draw, num_tokens, together=True)
            async with AsyncClient(mesh.router_addresses) as client:
                status = await client.status()
        for number, stream in zip(group.numbers, streams, strict=True):
            outputs[number] = stream.token_ids
        num_preemptions += sum(worker.load.num_preemptions for worker in status.workers)
    return Outcome("mesh, preempted", outputs, num_preemptions)
