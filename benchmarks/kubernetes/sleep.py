"""A mesh that sleeps and wakes again and again while clients ask: what a trainer on the same machine asks of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from benchmarks.harness import MODEL, Figure, Options, say
from benchmarks.kubernetes.weights import NUM_CLIENTS, NUM_PROMPTS, Seen, ask, keep_asking
from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig

NUM_SLEEPS, ASLEEP_S = 10, 1.0


def memory_mb(pids: list[int]) -> float:
    """The processes' share of memory (PSS), pages that others use counted in part."""
    found = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found / 1024


async def figures(options: Options) -> list[Figure]:
    """Prefill and decode separated, under the load of the part "weights"."""
    config = LocalMeshConfig(
        model=str(options.model), model_name=MODEL, num_prefill=1, num_decode=1, port=0, num_threads=1,
        worker_args=("--kv-memory-mb", "512"),
    )  # fmt: skip
    num_sleeps = int(options.pick(NUM_SLEEPS, 2))
    sleep_s, wake_s, first_s = list[float](), list[float](), list[float]()
    awake_mb, asleep_mb = list[float](), list[float]()
    async with LocalMesh(config, on_event=say) as mesh, AsyncClient(mesh.router_addresses) as client:
        pids = [pid for name, pid in mesh.pids.items() if name.startswith(("prefill", "decode"))]
        expected = [await ask(client, place, Seen()) for place in range(NUM_PROMPTS)]
        seen, stop = Seen(), asyncio.Event()
        asking = [asyncio.create_task(keep_asking(client, number, seen, stop)) for number in range(NUM_CLIENTS)]
        for _ in range(num_sleeps):
            await asyncio.sleep(3.0)
            awake_mb.append(memory_mb(pids))
            sleep_s.append(await _timed(client, "asleep"))
            await asyncio.sleep(ASLEEP_S)
            asleep_mb.append(memory_mb(pids))
            wake_s.append(await _timed(client, "running"))
            woken, before = time.monotonic(), seen.num_tokens
            while seen.num_tokens == before:  # noqa: ASYNC110  it is what is measured
                await asyncio.sleep(0.001)
            first_s.append(time.monotonic() - woken)
            say(f"asleep in {sleep_s[-1]:.2f} s: {awake_mb[-1]:.0f} -> {asleep_mb[-1]:.0f} MB; awake in {wake_s[-1]:.2f} s")
        stop.set()
        await asyncio.gather(*asking)
    changed = [place for place, tokens in seen.answers if tokens != expected[place]]
    what = f"a mesh of SmolLM2-135M that sleeps {num_sleeps} times under load ({NUM_CLIENTS} streams)"
    return [
        Figure(f"{what}: failed requests", len(seen.errors), "requests", "lower", 0),
        Figure(f"{what}: answers with other tokens", len(changed), "answers", "lower", 0),
        Figure(f"{what}: answers", len(seen.answers), "answers", "higher"),
        Figure(f"{what}: until asleep, median", statistics.median(sleep_s), "s", "lower"),
        Figure(f"{what}: until awake, median", statistics.median(wake_s), "s", "lower"),
        Figure(f"{what}: until awake, longest", max(wake_s), "s", "lower"),
        Figure(f"{what}: from then to the first token of any stream, median", statistics.median(first_s), "s", "lower"),
        Figure(f"{what}: memory of both workers (PSS) awake", statistics.median(awake_mb), "MB", "lower"),
        Figure(f"{what}: memory of both workers (PSS) asleep", statistics.median(asleep_mb), "MB", "lower"),
    ]


async def _timed(client: AsyncClient, state: str) -> float:
    began = time.monotonic()
    done = await client.set_serving(state, timeout=120)
    assert not [worker.error for worker in done.workers if worker.error], done
    return time.monotonic() - began
