"""Conversations of agents whose histories together are longer than a pool: 8 turns with 500 new tokens each, at several rates,
through a mesh that fetches and restores KV and through one that computes it again; both run, and take turns.
"""

from __future__ import annotations

import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from benchmarks.harness import Figure, say
from benchmarks.kv.meshes import WITH, WITHOUT, interleaved, num_computed, running
from benchmarks.peers import systems
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.measure import Measurement, measure
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.result import Result
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.target import Target
from pdmesh.loadtest.workload import Arrivals, TrafficClass, Workload

TURNS, QUESTION, ANSWER, THINK_S = 8, 372, 128, 2.0
RATES = (0.06, 0.12)
"""Sessions a second: some three at a time, and some six."""
WINDOW_S, WARMUP_S = 60.0, 20.0
POOL_MB = 104
"""Of each worker: some 4 700 tokens, one of these conversations at its end."""
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
VLLM_BLOCK, MAX_CONTEXT = 128, 8192
"""Tokens of a block of vLLM on a CPU."""
OBJECTIVES = Objectives(ttft_ms=2000, tpot_ms=150)


@dataclass
class Seen:
    """Hold what a mesh did at each rate."""

    goodputs: list[float] = field(default_factory=list)
    later_ms: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_requests: int = 0


async def load(target: Target, rate: float, seed: int) -> Result:
    """Return the result of sessions at this rate."""
    workload = Workload(
        Arrivals("constant", rate=rate),
        (TrafficClass(input_tokens=fixed(QUESTION), output_tokens=fixed(ANSWER)),),
        turns=fixed(TURNS),
        think_s=fixed(THINK_S),
    )
    await target.check()
    measurement = Measurement(workload, ObjectiveBook(OBJECTIVES), seed=seed, duration_s=WINDOW_S, warmup_s=WARMUP_S)
    return await measure(target, measurement)


async def figures(num_each: int) -> list[Figure]:
    """Return the figures of meshes with so many workers of each kind."""
    seen = {name: Seen() for name in (WITH, WITHOUT)}
    async with AsyncExitStack() as stack:
        meshes: dict[str, LocalMesh] = {}
        targets: dict[str, Target] = {}
        for name in (WITH, WITHOUT):
            sources = {"has_tiers": name == WITH, "fetches": name == WITH}
            mesh = running("--kv-memory-mb", str(POOL_MB), "--max-context", "4608", prefill=num_each, decode=num_each, **sources)
            meshes[name] = await stack.enter_async_context(mesh)
            targets[name] = target = GrpcTarget(",".join(meshes[name].router_addresses), GrpcSettings())
            stack.push_async_callback(target.close)
        for number, rate in enumerate(RATES):
            for name in interleaved(number):
                before = await num_computed(meshes[name])
                result = await load(targets[name], rate, seed=100 * num_each + number)
                later = result.by_turns["later"].ttft.p50
                seen[name].goodputs.append(result.summary.goodput)
                seen[name].later_ms.append(later if later is not None else float("inf"))
                seen[name].num_computed += await num_computed(meshes[name]) - before
                seen[name].num_requests += result.summary.num_requests
                say(f"{num_each} + {num_each}, {rate} sessions/s, {name}: goodput {result.summary.goodput:.3f}, later {later} ms")
    return _figures(f"{num_each} + {num_each}", seen[WITH], seen[WITHOUT])


async def peer_figures() -> list[Figure]:
    """Return the figures of vLLM on both cores, whose prefix cache has as many tokens as both pools of 1 + 1. Its own offloading
    needs a GPU (vllm/v1/kv_offload/cpu/spec.py refuses others)."""
    found = []
    blocks = str(2 * POOL_MB * 2**20 // BYTES_PER_TOKEN // VLLM_BLOCK)
    async with systems.vllm(max_context=MAX_CONTEXT, flags=("--num-gpu-blocks-override", blocks)) as target:
        await load(target, RATES[0], seed=99)  # warms up
        for number, rate in enumerate(RATES):
            result = await load(target, rate, seed=100 + number)
            later = result.by_turns["later"].ttft.p50
            at = f"vLLM, prefix cache of as many tokens, {rate} sessions/s"
            say(f"{at}: goodput {result.summary.goodput:.3f}, later {later} ms")
            found.append(Figure(f"goodput of {at}", round(result.summary.goodput, 3), "requests/s", "higher", peer="vllm"))
            if later is not None:
                found.append(Figure(f"TTFT p50 of turns 2 to {TURNS} of {at}", round(later, 1), "ms", "lower", peer="vllm"))
    return found


def _figures(shape: str, kept: Seen, computed: Seen) -> list[Figure]:
    ratios = [one / other for one, other in zip(kept.later_ms, computed.later_ms, strict=True)]
    best = max(kept.goodputs) / max(computed.goodputs) if max(computed.goodputs) else float("inf")
    found = [
        Figure(
            f"TTFT p50 of turns 2 to {TURNS} with fetching and a disk tier, of that without, {shape}, median of rates",
            round(statistics.median(ratios), 3),
            "ratio",
            "lower",
            goal=0.5,
        ),
        Figure(
            f"goodput with fetching and a disk tier, of that without, {shape}, best of {len(RATES)} rates each",
            round(best, 3),
            "ratio",
            "higher",
            goal=1.3,
        ),
    ]
    for number, rate in enumerate(RATES):
        for words, one in (("with", kept), ("without", computed)):
            at = f"{words} fetching and a disk tier, {shape}, {rate} sessions/s"
            found.append(Figure(f"goodput {at}", round(one.goodputs[number], 3), "requests/s", "higher"))
            found.append(Figure(f"TTFT p50 of turns 2 to {TURNS} {at}", round(one.later_ms[number], 1), "ms", "lower"))
    return found
