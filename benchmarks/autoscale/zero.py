"""A local mesh that goes to zero when nobody asks, and comes back for a request that waits: real weights, real processes."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field, replace

from benchmarks.autoscale.scenario import Options
from benchmarks.harness import MODEL, PLAIN_FLAGS, Figure, say
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Delta
from pdmesh.commands.up_autoscale import AutoscaleOptions, local_loop, scaled
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

SCALING = AutoscaleOptions(
    autoscale=True, max_workers=2, ttft_ms=2000, tpot_ms=200, cool_down_s=5.0, stale_after_s=8.0, zero_after_s=8.0
)
"""Objectives that a request which waits for a start cannot keep: it is to be served, not refused for that."""
CYCLES = 5
AT_ONCE = 4
PROMPT = "The capital of France is"
PATIENCE_S = 120.0
MOST_OVER_START = 1.5


@dataclass
class Seen:
    """Seconds from a waking request to its first token; of starts, as the processes say themselves; and what failed."""

    waits_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    num_asked: int = 0
    failures: list[str] = field(default_factory=list)


async def figures(options: Options) -> list[Figure]:
    """A minute and a half."""
    seen = Seen()
    folder = options.folder / "zero"
    base = LocalMeshConfig(
        model=str(options.model), model_name=MODEL, num_prefill=0, num_decode=0, num_both=1, port=0, num_threads=2,
        log_dir=str(folder), worker_args=PLAIN_FLAGS,
    )  # fmt: skip
    config = SCALING.prepared(base)
    objectives = SCALING.objectives_file(config, folder)
    config = replace(config, router_args=("--objectives", str(objectives), *config.router_args))
    async with (
        LocalMesh(config, on_progress=say) as mesh,
        scaled(local_loop(mesh, SCALING, objectives, say)),
        AsyncClient(mesh.router_addresses) as client,
    ):
        await _ask(client, seen)
        seen.waits_s.clear()
        for _ in range(int(options.pick(CYCLES, 1))):
            await _until_empty(mesh)
            await asyncio.gather(*(_ask(client, seen) for _ in range(AT_ONCE)))
            seen.starts_s += [worker.start_s for worker in mesh.workers if worker.start_s]
    return figures_of(seen)


def figures_of(seen: Seen) -> list[Figure]:
    """What failed is said also where nothing was answered. Pure."""
    wait_s, start_s = _median(seen.waits_s), _median(seen.starts_s)
    ttft: float | str = "absent: no request was answered" if wait_s is None else round(wait_s, 2)
    over: float | str = "absent: no request was answered" if wait_s is None else "absent: no worker was started"
    if wait_s is not None and start_s is not None:
        over = round(wait_s / start_s, 2)
    name, limit = f"from zero, {AT_ONCE} requests at once", None if start_s is None else round(start_s, 2)
    return [
        Figure(f"{name}: requests that failed", len(seen.failures), f"of {seen.num_asked}", "lower", goal=0),
        Figure(f"{name}: TTFT, median", ttft, "s", "lower", limit=limit),
        Figure(f"{name}: TTFT over a worker's start", over, "times", "lower", goal=MOST_OVER_START),
    ]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


async def _until_empty(mesh: LocalMesh) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while mesh.workers:  # noqa: ASYNC110 - the event happens in other processes
            await asyncio.sleep(0.1)
    say("no worker is left")


async def _ask(client: AsyncClient, seen: Seen) -> None:
    began = time.monotonic()
    seen.num_asked += 1
    first_s: float | None = None
    try:
        async with client.generate_stream(PROMPT, temperature=0, max_tokens=8, timeout=PATIENCE_S) as stream:
            async for event in stream:
                if first_s is None and isinstance(event, Delta):
                    first_s = time.monotonic() - began
        seen.waits_s.append(time.monotonic() - began if first_s is None else first_s)
    except MeshError as error:
        seen.failures.append(str(error))
