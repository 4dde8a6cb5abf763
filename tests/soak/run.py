"""`make bench-soak`: four hours of mixed traffic over all protocols against a mesh of SmolLM2 in int8.

    python -m tests.soak --seconds 300

Writes `benchmarks/results/soak.json` if it ran for an hour or more; exits 1 if an answer was wrong, an error came that no client
has caused, memory, open files or threads grew, or something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from redis.exceptions import RedisError

from benchmarks.harness import say, show, write
from pdmesh.client.client import AsyncClient
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model
from tests.mesh.checks import Footprint, assert_whole
from tests.soak.agents import MODEL_NAME
from tests.soak.ledger import Ledger
from tests.soak.report import Soak
from tests.soak.samples import Sample, Sampler
from tests.soak.sides.base import MakeSide
from tests.soak.sides.engine_side import EngineSide
from tests.soak.sides.kserve_side import KServeSide
from tests.soak.sides.mesh_side import MeshSide
from tests.soak.sides.openai_side import OpenAiSide
from tests.soak.traffic import NUM_FILLING, Traffic

SECONDS = 4 * 3600.0
LEAST_S = 3600.0  # a shorter run says too little to be kept
NUM_CLIENTS = 12
MAX_INFLIGHT = MAX_QUEUED = 16  # more than the clients, less than a burst
BURST_SIZE = 64
PERIOD_S = 10.0
# Caches are full long before the end, so that what grows then is a leak: blocks of KV, prompts that the router remembers.
WORKER_ARGS = ("--kv-memory-mb", "256")
ROUTER_ARGS = (
    *("--max-inflight", str(MAX_INFLIGHT), "--max-queued", str(MAX_QUEUED)),
    *("--prefix-index-blocks", "8192", "--http-keep-responses-s", "30"),
)


async def soak(model: Path, *, seed: int, seconds: float) -> Soak:
    """Runs the mesh, the traffic and the samples; ends everything."""
    deaths: list[str] = []
    config = LocalMeshConfig(
        model=str(model),
        model_name=MODEL_NAME,
        num_decode=1,
        num_both=1,
        port=0,
        http_port=0,
        num_threads=1,
        restart=False,
        worker_args=WORKER_ARGS,
        router_args=ROUTER_ARGS,
    )
    mesh = LocalMesh(config, on_event=deaths.append)
    say(f"logs of all processes: {mesh.log_dir}")
    async with mesh:
        footprint = Footprint.of(mesh)
        run = await _traffic(mesh, seed=seed, seconds=seconds)
        run.deaths = list(deaths)
        try:
            await assert_whole(mesh, timeout_s=30)
        except AssertionError as error:
            run.leaks.append(f"held when nobody asks any more: {error}")
    try:
        footprint.assert_gone()
    except AssertionError as error:
        run.leaks.append(f"left after the end: {error}")
    return run


async def _traffic(mesh: LocalMesh, *, seed: int, seconds: float) -> Soak:
    ledger = Ledger()
    router, url = mesh.router_address, mesh.http_urls[0]
    rng = random.Random(seed)
    sides: list[MakeSide] = [
        lambda: MeshSide(router),
        lambda: OpenAiSide(url, rng),
        lambda: KServeSide(router, rng),
        lambda: EngineSide(router, rng),
    ]
    traffic = Traffic(sides, ledger, url=url, seed=seed, num_clients=NUM_CLIENTS, burst_size=BURST_SIZE)
    async with AsyncClient(router) as client:
        sampler = Sampler({**mesh.pids, "clients": os.getpid()}, client, mesh.redis_url)
        say("filling caches")
        async with traffic.running():
            started = time.monotonic()
            until = started + seconds
            while time.monotonic() < until:
                try:
                    sample = await sampler.take(ledger.num_requests)
                except (OSError, MeshError, RedisError) as error:
                    ledger.problem("samples", f"the mesh can no longer be looked at: {error!r}")
                    break
                if len(sampler.samples) % 3 == 1:
                    say(_line(sample, ledger))
                await asyncio.sleep(max(0.0, min(started + len(sampler.samples) * PERIOD_S, until) - time.monotonic()))
        elapsed_s = time.monotonic() - started
        await sampler.close()
    return Soak(ledger, sampler.samples, elapsed_s)


def _line(sample: Sample, ledger: Ledger) -> str:
    memory = ", ".join(f"{name} {memory:.0f}" for name, memory in sample.memory.items())
    rate = (sample.num_requests - NUM_FILLING) / max(1.0, sample.at_s)
    wrong = f"; {ledger.num_problems} PROBLEMS, the last: {ledger.problems[-1]}" if ledger.problems else ""
    return f"{sample.at_s:.0f} s: {sample.num_requests} requests ({rate:.1f}/s), MB: {memory}{wrong}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"how long (default: {SECONDS:g})")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (default: 1)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if something was wrong."""
    arguments = _arguments(argv)
    model = ensure_model("smollm2-135m-instruct", say)
    run = asyncio.run(soak(model, seed=arguments.seed, seconds=arguments.seconds))
    say("\n".join([*run.table(), *run.problems]))
    if run.seconds >= LEAST_S:
        write("soak", run.figures(), problems=run.problems)
    else:
        with suppress(BrokenPipeError):
            show(run.figures())
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
