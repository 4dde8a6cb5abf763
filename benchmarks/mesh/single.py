"""One engine alone, then single requests behind router, prefill and decode; in int8, which is the default, and in float32.

Engine figures use all cores; where mesh and engine are compared, every engine has one thread, as the workers of a
two-core mesh have. Nobody guesses tokens ahead: `make bench-spec` measures that.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.engine_runs import DEFAULT, FLOAT32, GREEDY, Settings, flags_of, make_engine, prompt, timed
from benchmarks.harness import PLAIN, Figure, Options, event_loop_cpu_ns, interleave, process_cpu_ns, say
from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.cpu.library import product_peak_gop_s, read_bandwidth_gb_s
from pdmesh.engine.request import EngineRequest
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

BATCHES = (1, 4, 16, 32)
PREFILLS = (128, 512, 2000)
NUMBERS: dict[str, Settings] = {"int8": {**DEFAULT, **PLAIN}, "float32": {**FLOAT32, **PLAIN}}
BYTES_PER_WEIGHT = {"int8": 1, "float32": 4}
LAYER_WEIGHTS, HEAD_WEIGHTS = 106.2e6, 28.3e6  # of the model's products; prefill needs the head for one token only
PROMPT_TOKENS, OUTPUT_TOKENS, ROUNDS = 160, 64, 5
STREAMS = 16


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


def engine_figures(options: Options) -> list[Figure]:
    """Decode and prefill speed of one engine on all cores, with the machine's limits."""
    folder, rounds = options.model, int(options.pick(ROUNDS, 1))
    bandwidth = read_bandwidth_gb_s()
    peaks = {numbers: product_peak_gop_s(numbers) for numbers in NUMBERS}
    run = iter(range(10**6))
    cases, limits = {}, {}
    for numbers, settings in NUMBERS.items():
        engine = make_engine(folder, max_num_batched_tokens=2048, prefix_caching=False, **settings)
        for batch in BATCHES:
            name = f"engine {numbers}: decode, batch {batch}"
            cases[name] = partial(_decode_case, engine, batch, run)
            read_s = (LAYER_WEIGHTS + HEAD_WEIGHTS) * BYTES_PER_WEIGHT[numbers] / (bandwidth * 1e9)
            limits[name] = batch / max(read_s, 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) * batch / (peaks[numbers] * 1e9))
        for length in PREFILLS:
            name = f"engine {numbers}: prefill, {length} tokens"
            cases[name] = partial(_prefill_case, engine, length, run)
            limits[name] = peaks[numbers] * 1e9 / (2 * LAYER_WEIGHTS)
    medians = interleave(cases, rounds)
    return [
        Figure("read bandwidth", bandwidth, "GB/s", "higher"),
        *(Figure(f"{numbers} product peak", peak, "10^9 operations/s", "higher") for numbers, peak in peaks.items()),
        *(Figure(name, value, "tokens/s", "higher", limit=limits[name]) for name, value in medians.items()),
    ]


def _decode_case(engine: Engine, batch: int, run: Iterator[int]) -> float:
    return decode_speed(engine, batch, f"d{next(run)}-")


def _prefill_case(engine: Engine, length: int, run: Iterator[int]) -> float:
    return prefill_speed(engine, length, f"p{next(run)}")


@dataclass
class Samples:
    """TTFT and TPOT samples in milliseconds by name."""

    ttft: dict[str, list[float]]
    tpot: dict[str, list[float]]

    def add(self, name: str, ttft_s: float, tpot_s: float) -> None:
        self.ttft.setdefault(name, []).append(ttft_s * 1e3)
        self.tpot.setdefault(name, []).append(tpot_s * 1e3)


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


async def latency_figures(folder: Path, meshes: Mapping[str, LocalMesh], rounds: int) -> list[Figure]:
    """TTFT and TPOT of single requests: engine in this process (one thread), mesh REMOTE, mesh LOCAL, in turn, in all numbers."""
    engines = {numbers: make_engine(folder, num_threads=1, prefix_caching=False, **NUMBERS[numbers]) for numbers in meshes}
    samples = Samples({}, {})
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(AsyncClient(mesh.router_addresses)) for name, mesh in meshes.items()}
        for number, numbers, where in product(range(rounds + 1), meshes, ("engine", "mesh REMOTE", "mesh LOCAL")):
            ids = prompt(number * 31 + len(where), PROMPT_TOKENS)
            if where == "engine":
                ttft, tpot = one_request(engines[numbers], ids, OUTPUT_TOKENS, f"l{number}")
            else:
                ttft, tpot = await through_mesh(clients[numbers], ids, where.split()[1].lower())
            if number:  # the first round warms up
                samples.add(f"{where}, {numbers}", ttft, tpot)
            say(f"{where}, {numbers}: TTFT {ttft * 1e3:.1f} ms, TPOT {tpot * 1e3:.1f} ms")
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
    label = f"CPU per streamed token, {STREAMS} streams, int8"
    return [
        Figure(f"{label}: router process", statistics.median(per_router), "us", "lower"),
        Figure(f"{label}: decode worker's event loop", statistics.median(per_loop), "us", "lower"),
    ]


def mesh_in(numbers: str, folder: Path) -> LocalMesh:
    flags = (*flags_of(NUMBERS[numbers]), "--kv-memory-mb", "1024")
    return LocalMesh(LocalMeshConfig(model=str(folder), port=0, worker_args=flags))


async def measure(options: Options) -> list[Figure]:
    """TTFT and TPOT of single requests, and the CPU of streamed tokens."""
    folder = options.model
    # Both at once, so that they can take turns: the one that is not asked sleeps.
    async with AsyncExitStack() as stack:
        meshes = {numbers: await stack.enter_async_context(mesh_in(numbers, folder)) for numbers in NUMBERS}
        figures = await latency_figures(folder, meshes, int(options.pick(ROUNDS, 1)))
        return figures + await cpu_figures(meshes["int8"])
