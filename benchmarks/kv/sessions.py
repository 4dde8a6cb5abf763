"""Conversations of agents whose histories together are longer than a pool: 8 turns with 500 new tokens each, all of them to their
end, through a mesh that fetches and restores KV and through one that computes it again; both run, and take turns.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from benchmarks.harness import Figure, say
from benchmarks.kv.conversations import ask, tokens_of
from benchmarks.kv.meshes import WITH, WITHOUT, interleaved, num_computed, running
from benchmarks.peers import systems
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.measure import Measurement, measure
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.workload import Arrivals, TrafficClass, Workload

TURNS, QUESTION, ANSWER, THINK_S = 8, 372, 128, 2.0
NUM_SESSIONS, GAP_S = 3, 8.0
"""Conversations of a round for each pair of workers, and the seconds between their beginnings."""
NUM_ROUNDS = {1: 2, 2: 1}
POOL_MB = 104
"""Of each worker: some 4 700 tokens, one of these conversations at its end."""
POOL_FLAGS = ("--kv-memory-mb", str(POOL_MB), "--kv-dtype", "bfloat16")
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
VLLM_BLOCK, MAX_CONTEXT = 128, 8192
"""Tokens of a block of vLLM on a CPU."""
TTFT_S, TPOT_S = 2.0, 0.15
"""Objectives of a turn."""


@dataclass
class Seen:
    """Hold what a mesh did: by round, and by turn behind the first ones of conversations, in seconds."""

    goodputs: list[float] = field(default_factory=list)
    later_s: list[float] = field(default_factory=list)
    num_computed: int = 0


@dataclass(frozen=True)
class Turn:
    """Hold the times of a turn in seconds, and how many tokens it gave."""

    ttft_s: float
    total_s: float
    num_tokens: int

    @property
    def is_good(self) -> bool:
        return self.ttft_s <= TTFT_S and (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1) <= TPOT_S


async def converse(client: AsyncClient, number: int, after_s: float, turns: int) -> tuple[list[Turn], list[int]]:
    """Return the turns of a conversation that begins after so long, and its whole history."""
    await asyncio.sleep(after_s)
    history, done = list[int](), list[Turn]()
    for turn in range(turns):
        history += tokens_of(number * TURNS + turn, QUESTION)
        began = time.perf_counter()
        ttft_s, answer = await ask(client, history, ANSWER, None)
        done.append(Turn(ttft_s, time.perf_counter() - began, len(answer)))
        history += answer
        await asyncio.sleep(THINK_S)
    return done, history


async def load(
    client: AsyncClient, first: int, num: int, gap_s: float, turns: int = TURNS
) -> tuple[list[list[Turn]], object, float]:
    """Return the turns of `num` conversations, their histories, and the good turns a second."""
    began = time.perf_counter()
    ended = await asyncio.gather(*(converse(client, first + each, each * gap_s, turns) for each in range(num)))
    took_s = time.perf_counter() - began
    done = [each for each, _ in ended]
    return done, [history for _, history in ended], sum(turn.is_good for each in done for turn in each) / took_s


async def figures(num_each: int) -> list[Figure]:
    """Return the figures of meshes with so many workers of each kind."""
    seen, num, gap_s = {name: Seen() for name in (WITH, WITHOUT)}, NUM_SESSIONS * num_each, GAP_S / num_each
    async with AsyncExitStack() as stack:
        meshes: dict[str, LocalMesh] = {}
        clients: dict[str, AsyncClient] = {}
        for name in (WITH, WITHOUT):
            sources = {"has_tiers": name == WITH, "fetches": name == WITH}
            mesh = running(*POOL_FLAGS, "--max-context", "4608", prefill=num_each, decode=num_each, **sources)
            meshes[name] = await stack.enter_async_context(mesh)
            clients[name] = await stack.enter_async_context(AsyncClient(meshes[name].router_addresses))
            await load(clients[name], 900, num, gap_s=0.5, turns=1)  # warms up
        for number in range(NUM_ROUNDS[num_each]):
            histories = []
            for name in interleaved(number):
                before = await num_computed(meshes[name])
                done, history, goodput = await load(clients[name], 1000 + 100 * number, num, gap_s)
                later_s = statistics.median(turn.ttft_s for each in done for turn in each[1:])
                seen[name].goodputs.append(goodput)
                seen[name].later_s.append(later_s)
                seen[name].num_computed += await num_computed(meshes[name]) - before
                histories.append(history)
                words = f"goodput {goodput:.3f}, later {later_s:.2f} s, {seen[name].num_computed} tokens computed"
                say(f"{num_each} + {num_each}, round {number + 1}, {name}: {words}")
            if histories[0] != histories[1]:
                raise AssertionError(f"conversations of round {number + 1} differ between the meshes")
    return _figures(f"{num_each} + {num_each}", seen[WITH], seen[WITHOUT])


async def peer_figures() -> list[Figure]:
    """Return the figures of vLLM on both cores, whose prefix cache has as many tokens as both pools of 1 + 1. Its own offloading
    needs a GPU (vllm/v1/kv_offload/cpu/spec.py refuses others)."""
    blocks = str(2 * POOL_MB * 2**20 // BYTES_PER_TOKEN // VLLM_BLOCK)
    workload = Workload(
        Arrivals("constant", rate=1 / GAP_S),
        (TrafficClass(input_tokens=fixed(QUESTION), output_tokens=fixed(ANSWER)),),
        turns=fixed(TURNS),
        think_s=fixed(THINK_S),
        max_sessions=NUM_SESSIONS,
    )
    book = ObjectiveBook(Objectives(ttft_ms=1000 * TTFT_S, tpot_ms=1000 * TPOT_S))
    async with systems.vllm(max_context=MAX_CONTEXT, flags=("--num-gpu-blocks-override", blocks)) as target:
        await target.check()
        for seed in (99, 100):  # the first one warms up
            window_s = NUM_SESSIONS * GAP_S + 1.0
            result = await measure(target, Measurement(workload, book, seed=seed, duration_s=window_s, finish_sessions=True))
    later = result.by_turns["later"].ttft.p50
    at = "vLLM, prefix cache of as many tokens, sessions of the load test"
    say(f"{at}: goodput {result.summary.goodput:.3f}, later {later} ms")
    found = [Figure(f"goodput of {at}", round(result.summary.goodput, 3), "requests/s", "higher", peer="vllm")]
    if later is not None:
        found.append(Figure(f"TTFT p50 of turns 2 to {TURNS} of {at}", round(later, 1), "ms", "lower", peer="vllm"))
    return found


def _figures(shape: str, kept: Seen, computed: Seen) -> list[Figure]:
    ratios = [one / other for one, other in zip(kept.later_s, computed.later_s, strict=True)]
    goodputs = [one / other if other else float("inf") for one, other in zip(kept.goodputs, computed.goodputs, strict=True)]
    words = f"with fetching and a disk tier, of that without, {shape}, pools of {POOL_MB} MB"
    found = [
        Figure(f"TTFT p50 of turns 2 to {TURNS} {words}", round(statistics.median(ratios), 3), "ratio", "lower", goal=0.5),
        Figure(f"goodput {words}", round(statistics.median(goodputs), 3), "ratio", "higher", goal=1.3),
        Figure(f"prompt tokens computed {words}", round(kept.num_computed / computed.num_computed, 3), "ratio", "lower"),
    ]
    for how, one in (("with", kept), ("without", computed)):
        at = f"{how} fetching and a disk tier, {shape}, pools of {POOL_MB} MB"
        found.append(Figure(f"goodput {at}", round(statistics.median(one.goodputs), 3), "requests/s", "higher"))
        found.append(
            Figure(f"TTFT p50 of turns 2 to {TURNS} {at}", round(1000 * statistics.median(one.later_s), 1), "ms", "lower")
        )
    return found
