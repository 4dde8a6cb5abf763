"""What a mesh costs beside the engine that it serves, at batch 1 and 16, and two workers of a core each beside one of both."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_runs import GREEDY, make_engine, prompt, timed
from benchmarks.harness import PLAIN, PLAIN_FLAGS, Figure, Options, event_loop_cpu_ns, process_cpu_s, say
from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

BATCHES = (1, 16)
TPOT_GOAL, SHARED_GOAL = 1.05, 0.95
PROMPT_TOKENS, OUTPUT_TOKENS, ROUNDS, STREAMS = 32, 128, 5, 16
WORKER = "worker-0"


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a mesh's processes, of the worker all threads and its event loop alone."""

    router: float
    worker: float
    loop: float

    @staticmethod
    def now(mesh: LocalMesh) -> Spent:
        """Return what was spent so far."""
        router, worker = mesh.member("router-0").pid, mesh.member(WORKER).pid
        return Spent(process_cpu_s(router), process_cpu_s(worker), event_loop_cpu_ns(worker) / 1e9)

    def per_thousand(self, before: Spent, tokens: int) -> tuple[float, float, float]:
        """Return what was spent since `before` on a thousand tokens."""
        pairs = ((self.router, before.router), (self.worker, before.worker), (self.loop, before.loop))
        router, worker, loop = (1000 * (after - earlier) / tokens for after, earlier in pairs)
        return router, worker, loop


async def stamps_of(client: AsyncClient, ids: Sequence[int], output_tokens: int) -> list[float]:
    """Return when each token of one stream came, in seconds of the loop's clock. Raises AssertionError where some are missing."""
    clock, stamps = asyncio.get_running_loop().time, list[float]()
    async with client.generate_stream(list(ids), temperature=0, max_tokens=output_tokens, ignore_eos=True) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                stamps += [clock()] * len(event.token_ids)
            elif isinstance(event, Completed) and len(stamps) != output_tokens:
                raise AssertionError(f"{len(stamps)} tokens instead of {output_tokens}")
    return stamps


def tpot_together(streams: Sequence[Sequence[float]]) -> float:
    """Return the seconds between tokens of a stream while all streams decode. Raises ValueError where they never do. Pure."""
    begin, end = max(stamps[0] for stamps in streams), min(stamps[-1] for stamps in streams)
    drawn = sum(sum(begin < stamp <= end for stamp in stamps) for stamps in streams)
    if end <= begin or not drawn:
        raise ValueError(f"{len(streams)} streams never decoded together: give more output tokens")
    return (end - begin) * len(streams) / drawn


async def measure_batches(options: Options) -> list[Figure]:
    """Return TPOT through the router over the engine's own, with as many threads each, and the CPU of a thousand tokens."""
    return [
        figure
        for threads in dict.fromkeys((1, len(os.sched_getaffinity(0))))
        for figure in await _measure_batches(options, threads)
    ]


async def _measure_batches(options: Options, threads: int) -> list[Figure]:
    rounds, output = int(options.pick(ROUNDS, 1)), int(options.pick(OUTPUT_TOKENS, 32))
    engine = make_engine(options.model, num_threads=threads, prefix_caching=False, **PLAIN)
    own: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    through: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    spent: dict[int, list[tuple[float, float, float]]] = {batch: [] for batch in BATCHES}
    async with _mesh(options.model, 1, threads) as mesh, AsyncClient(mesh.router_addresses) as client:
        for number in range(rounds + 1):
            for batch in BATCHES:
                prompts = [prompt(number * 100 + batch * 40 + stream, PROMPT_TOKENS) for stream in range(batch)]
                seconds, drawn = timed(engine, prompts, GREEDY.params(output, ignore_eos=True), f"{number}-{batch}-")
                before = Spent.now(mesh)
                streams = await asyncio.gather(*(stamps_of(client, ids, output) for ids in prompts))
                used = Spent.now(mesh).per_thousand(before, batch * output)
                if number:  # the first round warms up
                    own[batch].append(seconds * batch / drawn)
                    through[batch].append(tpot_together(streams))
                    spent[batch].append(used)
                    say(f"batch {batch}: engine {own[batch][-1] * 1e3:.2f} ms, behind the router {through[batch][-1] * 1e3:.2f}")
    engine.close()
    return [figure for batch in BATCHES for figure in batch_figures(batch, threads, own[batch], through[batch], spent[batch])]


def batch_figures(
    batch: int,
    threads: int,
    own: Sequence[float],
    through: Sequence[float],
    spent: Sequence[tuple[float, float, float]],
) -> list[Figure]:
    """Return the figures of one batch size from its rounds. Pure."""
    label = f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}, int8"
    engine, mesh = statistics.median(own), statistics.median(through)
    ratio = statistics.median(ours / alone for ours, alone in zip(through, own, strict=True))
    names = ("router process", "worker process", "worker's event loop")
    return [
        Figure(f"TPOT, {label}: engine", engine * 1e3, "ms", "lower"),
        Figure(f"TPOT, {label}: through the router", mesh * 1e3, "ms", "lower"),
        Figure(
            f"TPOT, {label}: through the router over the engine's",
            ratio,
            "times",
            "lower",
            goal=TPOT_GOAL,
            peer="the same engine",
        ),
        *(
            Figure(f"CPU of 1 000 tokens, {label}: {name}", statistics.median(each[place] for each in spent), "s", "lower")
            for place, name in enumerate(names)
        ),
    ]


async def measure_workers(options: Options) -> list[Figure]:
    """Return the tokens a second of two workers with a thread each over those of one with two."""
    rounds, output = int(options.pick(ROUNDS, 1)), int(options.pick(OUTPUT_TOKENS, 32))
    counts = (2, 1)
    speeds: dict[int, list[float]] = {count: [] for count in counts}
    async with AsyncExitStack() as stack:
        # Both at once, so that they can take turns: the one that is not asked sleeps.
        meshes = {count: await stack.enter_async_context(_mesh(options.model, count, 2 // count)) for count in counts}
        clients = {count: await stack.enter_async_context(AsyncClient(mesh.router_addresses)) for count, mesh in meshes.items()}
        for number in range(rounds + 1):
            for count, client in clients.items():
                prompts = [prompt(number * 50 + stream, PROMPT_TOKENS) for stream in range(STREAMS)]
                started = asyncio.get_running_loop().time()
                await asyncio.gather(*(stamps_of(client, ids, output) for ids in prompts))
                speed = STREAMS * output / (asyncio.get_running_loop().time() - started)
                if number:  # the first round warms up
                    speeds[count].append(speed)
                say(f"{count} workers: {speed:.1f} tokens/s")
    return worker_figures(speeds[2], speeds[1])


def worker_figures(two: Sequence[float], one: Sequence[float]) -> list[Figure]:
    """Return the figures from both meshes' tokens a second by round. Pure."""
    ratio = statistics.median(ours / other for ours, other in zip(two, one, strict=True))
    label = f"{STREAMS} streams, int8"
    peer = "one worker of two threads"
    return [
        Figure(f"{label}: two workers of a thread each", statistics.median(two), "tokens/s", "higher"),
        Figure(f"{label}: one worker of two threads", statistics.median(one), "tokens/s", "higher"),
        Figure(f"{label}: two workers over one", ratio, "times", "higher", goal=SHARED_GOAL, peer=peer),
    ]


def _mesh(folder: Path, workers: int, threads: int) -> LocalMesh:
    """A router and workers with both roles, which compute every prompt themselves."""
    flags = ("--kv-memory-mb", "512", *PLAIN_FLAGS)
    config = LocalMeshConfig(
        model=str(folder), num_prefill=0, num_decode=0, num_both=workers, num_threads=threads, port=0, worker_args=flags
    )
    return LocalMesh(config, on_event=say)
