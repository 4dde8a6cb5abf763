"""A tenth of Mooncake's conversation trace on a real mesh, with fetching and a disk tier and without, beside the simulator.

Prompts and answers have a tenth of the trace's lengths, and equal blocks of it are equal tokens (`mooncake.py`). The simulator is
told what workers said of themselves in load reports while they served other requests before, and the rates of the settings below.
It needs the trace: PDMESH_TRACES names the folder that holds it.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Figure, say
from benchmarks.kv.conversations import ask, tokens_of
from benchmarks.kv.meshes import num_computed, running
from benchmarks.kv.mooncake import TENTH, Figures, Shape, load, prompt_of, simulated
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.runtime.rpc.channel import connect
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.workers.spec import KNOWN_STEPS, WorkerSpec
from pdmesh.v1 import worker_pb2, worker_pb2_grpc

TRACE = "mooncake_conversation_trace.jsonl"
NUM_REQUESTS, SPEEDUP, MAX_TOKENS = 60, 0.06, 4000
"""A tenth of the lengths on one core, at a sixteenth of the trace's pace: some 0.17 requests a second."""
POOL_MB = 384
POOL_FLAGS = ("--kv-memory-mb", str(POOL_MB), "--kv-dtype", "bfloat16")
FETCH_BYTES_PER_S, TIER_BYTES_PER_S, TIER_BYTES = 1e9, 1e9, 8e9
MESH = Shape(1, 1, 0, FETCH_BYTES_PER_S, TIER_BYTES, TIER_BYTES_PER_S)
NUM_WARMING = 12
GOAL = 0.15


@dataclass(frozen=True)
class Real:
    """What the real mesh did. Seconds."""

    ttft_p50_s: float
    num_computed: int
    spec: WorkerSpec


async def figures() -> list[Figure]:
    folder = os.environ.get("PDMESH_TRACES")
    if not folder:
        raise ValueError(f"PDMESH_TRACES: name the folder that holds {TRACE}")
    arrivals = [each for each in load(str(Path(folder) / TRACE), None, TENTH, SPEEDUP) if each.num_input < MAX_TOKENS]
    arrivals = arrivals[:NUM_REQUESTS]
    found = []
    for name, keeps in (("neither", False), ("fetching and tiers", True)):
        real = await on_real_mesh(arrivals, keeps=keeps)
        say(f"{name}: TTFT p50 {real.ttft_p50_s:.3f} s, {real.num_computed} tokens computed, as {real.spec}")
        ours = simulated(arrivals, real.spec, MESH, fetches=keeps, has_tiers=keeps)
        say(f"{name}, simulated: TTFT p50 {ours.ttft_p50_s:.3f} s, {ours.num_computed_tokens} tokens computed")
        found += _figures(name, real, ours)
    return found


def _figures(name: str, real: Real, ours: Figures) -> list[Figure]:
    words = f"Mooncake's conversations, a tenth, 1 + 1, {name}"
    pairs = (("TTFT p50", ours.ttft_p50_s, real.ttft_p50_s), ("tokens computed", ours.num_computed_tokens, real.num_computed))
    return [
        *(
            Figure(f"{words}: {what}, |simulated / real - 1|", round(abs(one / other - 1), 3), "share", "lower", goal=GOAL)
            for what, one, other in pairs
        ),
        Figure(f"{words}: TTFT p50, real", round(1000 * real.ttft_p50_s, 1), "ms", "lower"),
        Figure(f"{words}: tokens computed, real", real.num_computed, "tokens", "lower"),
    ]


async def on_real_mesh(arrivals: Sequence[Arrival], *, keeps: bool) -> Real:
    """Ask the requests when they are due."""
    async with (
        running(*POOL_FLAGS, "--num-threads", "1", prefill=1, decode=1, has_tiers=keeps, fetches=keeps) as mesh,
        AsyncClient(mesh.router_addresses) as client,
    ):
        for number in range(NUM_WARMING):  # other requests, one after the other and some together
            await ask(client, tokens_of(7_000_000 + number, 200 + 90 * number), 24, "remote")
        await asyncio.gather(*(ask(client, tokens_of(7_100_000 + number, 400), 48, "remote") for number in range(4)))
        spec, before, began = await spec_of(mesh), await num_computed(mesh), time.perf_counter()
        ttfts = await asyncio.gather(*(_ask(client, number, each, began) for number, each in enumerate(arrivals)))
        return Real(statistics.median(ttfts), await num_computed(mesh) - before, spec)


async def _ask(client: AsyncClient, number: int, arrival: Arrival, began: float) -> float:
    await asyncio.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
    late_s = time.perf_counter() - began - arrival.at_s
    ttft_s, _ = await ask(client, prompt_of(number, arrival, TENTH), arrival.num_output, None)
    return ttft_s + late_s


async def spec_of(mesh: LocalMesh) -> WorkerSpec:
    """Return the workers as the simulator takes them: as fast as they say they are, on average."""
    found = await asyncio.gather(*(_reported(address) for address in mesh.worker_addresses))
    prices = [
        (m.fixed_s, m.per_prefill_token_s, m.per_prefill_context_s, m.per_sequence_s, m.per_context_token_s)
        for m in (load.latency_model for _, load in found)
    ]
    fixed_s, token_s, context_s, row_s, row_context_s = map(statistics.fmean, zip(*prices, strict=True))
    info = found[0][0]
    size, num_blocks = info.layout.block_size, info.num_blocks
    return WorkerSpec(
        LatencyModel(fixed_s, token_s, context_s, row_s, row_context_s, num_steps=KNOWN_STEPS),
        max_num_batched_tokens=info.max_num_batched_tokens,
        block_size=size,
        num_blocks=num_blocks,
        max_context=info.max_context,
        max_num_seqs=info.max_num_seqs,
        kv_bytes_per_token=POOL_MB * 2**20 // (num_blocks * size),
        prefix_tokens=TENTH,
    )


async def _reported(address: str) -> tuple[worker_pb2.WorkerInfo, worker_pb2.LoadReport]:
    channel = connect(address)
    try:
        stub = worker_pb2_grpc.WorkerControlStub(channel)
        async for report in stub.Watch(worker_pb2.WatchRequest()):
            return await stub.GetInfo(worker_pb2.GetInfoRequest()), report
        raise RuntimeError(f"worker {address} reports no load")
    finally:
        await channel.close()
