"""Figures of our engine that need no peer: long contexts, Python's share of a step, starts, and memory of workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu.cases import VOCABULARY, RandomPrompts
from benchmarks.cpu.contest import Seat, first_token_seconds
from benchmarks.engine_runs import GREEDY, make_engine
from benchmarks.harness import PLAIN, Figure, Options, resident_bytes, say
from benchmarks.peers.environments import PDMESH_INT8, Contestant
from benchmarks.peers.shapes import LLAMA_3B
from benchmarks.peers.weights import Subject, random
from pdmesh.client.client import AsyncClient
from pdmesh.doctor.step_profile import Case, StepProfiler
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.cpu.library import read_bandwidth_gb_s
from pdmesh.engine.request import EngineRequest
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.catalogue import SMOLLM2, TINYLLAMA

KV_SHARE_GOAL, PYTHON_GOAL = 0.6, 0.05
SMALL_START_GOAL_S, LARGE_START_GOAL_S = 3.0, 6.0
MEMORY_GOAL_MB = 300.0
MB = 1e6

# Long contexts: the bytes of KV that a step reads more than at a short one, over the time that it takes longer.

SHORT_CONTEXT, LONG_CONTEXT, LONG_BATCHES = 64, 8000, (1, 8)
_LONG_POOL_MB, _WARM_UP_STEPS, _LONG_LIMIT_S = 1800, 3, 170.0


def long_context(options: Options) -> list[Figure]:
    """Return the share of read bandwidth over the KV, and the speed, of decode steps at a long context."""
    length, rounds, steps = int(options.pick(LONG_CONTEXT, 1000)), int(options.pick(5, 1)), int(options.pick(48, 8))
    engine = make_engine(options.model, kv_memory_mb=_LONG_POOL_MB, prefix_caching=False, max_num_batched_tokens=2048, **PLAIN)
    prompts = RandomPrompts(engine.model_config.vocab_size)
    kv_bytes = engine.kv.shape.bytes_per_block / engine.kv.shape.block_size
    samples: dict[tuple[int, int], list[float]] = {}
    bandwidths: list[float] = []
    started = time.monotonic()
    for number in range(rounds):
        if number and time.monotonic() - started > _LONG_LIMIT_S:
            break
        bandwidths.append(read_bandwidth_gb_s() * 1e9)
        for batch in LONG_BATCHES:
            for context in (SHORT_CONTEXT, length):
                seconds = step_seconds(engine, prompts, batch, context, steps)
                samples.setdefault((batch, context), []).append(seconds)
                say(f"round {number + 1}/{rounds}  batch {batch}, context {context}: {seconds * 1e3:.2f} ms a step")
    engine.close()
    medians = {place: statistics.median(values) for place, values in samples.items()}
    return [
        figure
        for batch in LONG_BATCHES
        for figure in kv_figures(
            batch, length, (medians[batch, SHORT_CONTEXT], medians[batch, length]), kv_bytes, statistics.median(bandwidths)
        )
    ]


def step_seconds(engine: Engine, prompts: RandomPrompts, batch: int, context: int, steps: int) -> float:
    """Return the mean time of a step in which `batch` sequences decode after `context` tokens, which share no block."""
    dealt = {f"sequence {number}": prompts.next(context) for number in range(batch)}
    # Those that are computed first decode while the others are computed: all must last until the end.
    params = GREEDY.params(batch * context // 2048 + _WARM_UP_STEPS + steps + 2 * batch + 8, ignore_eos=True)
    for name, tokens in dealt.items():
        if not engine.add(EngineRequest(request_id=name, prompt=tuple(tokens), sampling=params)):
            raise RuntimeError(f"the pool has no room for {batch} sequences of {context} tokens: raise _LONG_POOL_MB")
    while engine.stats().num_waiting_tokens:
        engine.step()
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    started, drawn = time.perf_counter(), 0
    for _ in range(steps):
        result = engine.step()
        drawn += sum(len(update.token_ids) for update in result.updates) if result else 0
    seconds = time.perf_counter() - started
    if drawn != batch * steps:
        raise AssertionError(f"{drawn} tokens in {steps} steps of {batch} sequences")
    for name in dealt:
        engine.release(name)
    while engine.has_work:
        engine.step()
    return seconds / steps


def kv_figures(batch: int, length: int, seconds: tuple[float, float], kv_bytes: float, bytes_s: float) -> list[Figure]:
    """Return figures from the seconds of a step at SHORT_CONTEXT and at `length`. Pure."""
    short, long = seconds
    label = f"long: decode, batch {batch}, context {length}"
    kv_s = batch * (length - SHORT_CONTEXT) * kv_bytes / bytes_s
    share = kv_s / (long - short) if long > short else "none: a long context took no longer, the machine is disturbed"
    about = f"KV over read bandwidth ({kv_bytes:.0f} bytes a token)"
    return [
        Figure(label, batch / long, "tokens/s", "higher"),
        Figure(f"{label}: {about}", share, "share", "higher", goal=KV_SHARE_GOAL, limit=1.0),
    ]


def python_share(options: Options) -> list[Figure]:
    """Return the share of a decode step of 16 sequences that passes outside the native call."""
    case = Case(16, 160)
    profiler = StepProfiler(EngineConfig(model=str(options.model)), [case], int(options.pick(64, 8)), say)
    profiles = [profiler.run(case) for _ in range(int(options.pick(5, 1)))]
    share = statistics.median(profile.python_share for profile in profiles)
    return [Figure("SmolLM2-135M: Python's share of the step, batch 16", share, "share", "lower", goal=PYTHON_GOAL)]


# Starts: from starting a process to its first token, files in the page cache.


def starts(options: Options) -> list[Figure]:
    """Return the start of the small model (one process warms the caches), and of the large one, whose first start packs its
    weights."""
    prompts = RandomPrompts(VOCABULARY)
    small = _seat(Subject(SMOLLM2.name), PDMESH_INT8)
    seconds = [first_token_seconds(small, prompts.next(16)) for _ in range(int(options.pick(4, 2)))][1:]
    label = "process start to first token"
    median = statistics.median(seconds)  # of processes that found the caches filled
    figures = [Figure(f"start: {label}, SmolLM2-135M int8", median, "s", "lower", goal=SMALL_START_GOAL_S)]
    if options.quick:
        return figures
    large = _seat(random(LLAMA_3B), PDMESH_INT8)
    first, second = (first_token_seconds(large, prompts.next(16)) for _ in range(2))
    return [
        *figures,
        Figure(f"start: {label}, 3B int8, first", first, "s", "lower"),
        Figure(f"start: {label}, 3B int8, again", second, "s", "lower", goal=LARGE_START_GOAL_S),
    ]


def _seat(subject: Subject, contestant: Contestant) -> Seat:
    return Seat(contestant, None, subject.folder(say), max_context=2048, stays=False)


# Memory of idle workers: each has answered one request. The pool is small, so that it is touched or not, it matters little.

_POOL_MB, _MEMORY_CONTEXT = 64, 2048
_MEBI = 2**20


@dataclass(frozen=True)
class Held:
    """What the workers of one mesh hold, in bytes: `resident` of the first, `pss` of all."""

    resident: int
    pss: int


async def memory(options: Options) -> list[Figure]:
    """Return the memory of an idle worker over packed weights and pool, and what a second one of the host adds."""
    models = {"SmolLM2-135M": SMOLLM2.name} if options.quick else {"SmolLM2-135M": SMOLLM2.name, "TinyLlama-1.1B": TINYLLAMA.name}
    found: list[Figure] = []
    for label, name in models.items():
        subject = Subject(name)
        packed = packed_bytes(_seat(subject, PDMESH_INT8))
        alone, both = [await _held(subject.folder(say), count) for count in (1, 2)]
        found += memory_figures(f"memory: {label} int8", packed, alone, both)
    return found


def memory_figures(label: str, packed: float, alone: Held, both: Held) -> list[Figure]:
    """Return figures from what one worker and two hold. Pure."""
    pool = _POOL_MB * _MEBI
    over, added = (alone.resident - packed - pool) / MB, (both.pss - alone.pss - pool) / MB
    unit = "MB"
    return [
        Figure(f"{label}: packed weights", packed / MB, unit, "lower"),
        Figure(f"{label}: idle worker, resident", alone.resident / MB, unit, "lower"),
        Figure(f"{label}: idle worker, over packed weights and pool", over, unit, "lower", goal=MEMORY_GOAL_MB),
        Figure(f"{label}: a second worker of the host adds, over its pool (Pss)", added, unit, "lower", goal=MEMORY_GOAL_MB),
    ]


def packed_bytes(seat: Seat) -> float:
    """Return the bytes of the packed weights, the embedding included, as an engine counts them."""
    child = seat.start(as_measured=True)
    try:
        child.wait_ready()
        return float(str(child.about["packed_bytes"]))
    finally:
        child.close()


async def _held(folder: Path, count: int) -> Held:
    """Start a mesh of so many workers with both roles, ask each, and measure them."""
    flags = ("--kv-memory-mb", str(_POOL_MB), "--max-context", str(_MEMORY_CONTEXT), *("--speculation", "none"))
    config = LocalMeshConfig(
        model=str(folder), num_prefill=0, num_decode=0, num_both=count, num_threads=1, port=0, worker_args=flags
    )
    prompts = RandomPrompts(VOCABULARY)
    async with LocalMesh(config, on_event=say) as mesh:
        async with AsyncClient(mesh.router_addresses) as client:
            for _ in range(2 * count):
                async with client.generate_stream(prompts.next(32), temperature=0, max_tokens=8, ignore_eos=True) as stream:
                    async for _ in stream:
                        pass
        pids = [pid for number in range(count) for pid in _with_children(mesh.member(f"worker-{number}").pid)]
        return Held(resident=sum(map(resident_bytes, _with_children(mesh.member("worker-0").pid))), pss=sum(map(pss_bytes, pids)))


def _with_children(pid: int) -> Sequence[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [pid, *(below for child in text.split() for below in _with_children(int(child)))]


def pss_bytes(pid: int) -> int:
    """Return the memory of a process in which what it shares counts by its share. Raises OSError when it has ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
