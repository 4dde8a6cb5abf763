"""`make bench-mesh`: the first table. The reference engine alone, then the same engine behind router, prefill and decode.

Engine figures use both cores; where mesh and engine are compared, every engine has one thread, as the workers of a
two-core mesh have.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cpu_time import event_loop_cpu_ns, process_cpu_ns
from benchmarks.engine_runs import GREEDY, make_engine, timed
from benchmarks.harness import Figure, interleave, say, write
from benchmarks.machine_limits import gemm_peak_gflop_s, read_bandwidth_gb_s
from engine.engine import Engine
from engine.request import EngineRequest
from pdmesh.client import AsyncClient, Completed, Delta
from pdmesh.launcher import LocalMesh
from pdmesh.launcher_plan import LocalMeshConfig
from pdmesh.models import ensure_model

BATCHES = (1, 4, 16, 32)
PREFILLS = (128, 512, 2000)
NUM_PARAMETERS = 134.5e6
PROMPT_TOKENS, OUTPUT_TOKENS, ROUNDS = 160, 64, 5
STREAMS = 16


def prompt(number: int, length: int) -> list[int]:
    """Token ids that share no block with another number's."""
    return [1000 + (number * 7919 + position * 104_729) % 40_000 for position in range(length)]


def decode_speed(engine: Engine, batch: int, tag: str) -> float:
    """Output tokens per second once all sequences decode."""
    params = GREEDY.params(OUTPUT_TOKENS, ignore_eos=True)
    prompts = [prompt(hash((tag, number)) % 100_000, PROMPT_TOKENS) for number in range(batch)]
    seconds, drawn = timed(engine, prompts, params, tag)
    return drawn / seconds


def prefill_speed(engine: Engine, length: int, tag: str) -> float:
    """Prompt tokens per second until the first token."""
    ttft, _ = one_request(engine, prompt(hash(tag) % 100_000, length), 1, tag)
    return length / ttft


def one_request(engine: Engine, ids: Sequence[int], num_tokens: int, tag: str) -> tuple[float, float]:
    """TTFT and TPOT of one request in an engine of this process, in seconds."""
    clock = time.monotonic
    started = clock()
    engine.add(EngineRequest(request_id=tag, prompt=tuple(ids), sampling=GREEDY.params(num_tokens, ignore_eos=True)))
    stamps: list[float] = []
    while engine.has_work:
        result = engine.step()
        stamps += [clock()] * sum(len(update.token_ids) for update in result.updates) if result else []
    return stamps[0] - started, (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1)


def engine_figures(folder: Path) -> list[Figure]:
    """Decode and prefill speed of one engine on all cores, with the machine's limits."""
    bandwidth, peak = read_bandwidth_gb_s(), gemm_peak_gflop_s()
    engine = make_engine(folder, max_num_batched_tokens=2048, prefix_caching=False)
    run = iter(range(10**6))
    cases = {f"decode, batch {b}": lambda b=b: decode_speed(engine, b, f"d{next(run)}-") for b in BATCHES}
    cases |= {f"prefill, {n} tokens": lambda n=n: prefill_speed(engine, n, f"p{next(run)}") for n in PREFILLS}
    medians = interleave(cases, ROUNDS)
    weight_bytes = NUM_PARAMETERS * 4
    limits = {f"decode, batch {b}": b * bandwidth * 1e9 / weight_bytes for b in BATCHES}
    limits |= {f"prefill, {n} tokens": peak * 1e9 / (2 * NUM_PARAMETERS) for n in PREFILLS}
    return [
        Figure("read bandwidth (torch sum)", bandwidth, "GB/s", "higher"),
        Figure("float32 product peak", peak, "GFLOP/s", "higher"),
        *(Figure(f"engine fp32: {name}", value, "tokens/s", "higher", limit=limits[name]) for name, value in medians.items()),
    ]


@dataclass
class Samples:
    """TTFT and TPOT samples in milliseconds by name."""

    ttft: dict[str, list[float]]
    tpot: dict[str, list[float]]


async def through_mesh(client: AsyncClient, ids: Sequence[int], mode: str) -> tuple[float, float]:
    """TTFT and TPOT of one request as a client sees them, in seconds."""
    clock = asyncio.get_running_loop().time
    started, stamps = clock(), []
    async with client.generate_stream(list(ids), temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, mode=mode) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                stamps += [clock()] * len(event.token_ids)
            elif isinstance(event, Completed) and len(stamps) != OUTPUT_TOKENS:
                raise AssertionError(f"{len(stamps)} tokens instead of {OUTPUT_TOKENS}")
    return stamps[0] - started, (stamps[-1] - stamps[0]) / (len(stamps) - 1)


async def latency_figures(folder: Path, mesh: LocalMesh) -> list[Figure]:
    """TTFT and TPOT of single requests: engine in this process (one thread), mesh REMOTE, mesh LOCAL, in turn."""
    torch.set_num_threads(1)
    engine = make_engine(folder, num_threads=1, prefix_caching=False)
    samples = Samples({}, {})
    async with AsyncClient(mesh.router_addresses) as client:
        for number in range(ROUNDS + 1):
            for where in ("engine", "mesh REMOTE", "mesh LOCAL"):
                ids = prompt(number * 31 + len(where), PROMPT_TOKENS)
                if where == "engine":
                    ttft, tpot = one_request(engine, ids, OUTPUT_TOKENS, f"l{number}")
                else:
                    ttft, tpot = await through_mesh(client, ids, where.split()[1].lower())
                if number:  # the first round warms up
                    samples.ttft.setdefault(where, []).append(ttft * 1e3)
                    samples.tpot.setdefault(where, []).append(tpot * 1e3)
                say(f"{where}: TTFT {ttft * 1e3:.1f} ms, TPOT {tpot * 1e3:.1f} ms")
    peer = "the same engine in one process, one thread"
    return [
        Figure(
            f"{kind}, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out: {where}",
            statistics.median(values),
            "ms",
            "lower",
            peer=peer,
        )
        for kind, table in (("TTFT", samples.ttft), ("TPOT", samples.tpot))
        for where, values in table.items()
    ]


async def cpu_figures(mesh: LocalMesh) -> list[Figure]:
    """CPU time that router and decode's event loop spend on each streamed token, 16 streams."""
    router, decode = mesh.member("router-0").pid, mesh.member("decode-0").pid
    per_router, per_loop = [], []
    async with AsyncClient(mesh.router_addresses) as client:
        for number in range(3):
            before = process_cpu_ns(router), event_loop_cpu_ns(decode)
            await asyncio.gather(*(through_mesh(client, prompt(900 + number * 50 + s, 32), "remote") for s in range(STREAMS)))
            tokens = STREAMS * OUTPUT_TOKENS
            per_router.append((process_cpu_ns(router) - before[0]) / tokens / 1e3)
            per_loop.append((event_loop_cpu_ns(decode) - before[1]) / tokens / 1e3)
    label = f"CPU per streamed token, {STREAMS} streams"
    return [
        Figure(f"{label}: router process", statistics.median(per_router), "us", "lower"),
        Figure(f"{label}: decode worker's event loop", statistics.median(per_loop), "us", "lower"),
    ]


async def main() -> None:
    folder = ensure_model("smollm2-135m-instruct", say)
    figures = engine_figures(folder)
    async with LocalMesh(LocalMeshConfig(model=str(folder), port=0, worker_args=("--kv-memory-mb", "1024"))) as mesh:
        figures += await latency_figures(folder, mesh)
        figures += await cpu_figures(mesh)
    write("mesh", figures, model="SmolLM2-135M-Instruct, fp32, reference backend")


if __name__ == "__main__":
    asyncio.run(main())
