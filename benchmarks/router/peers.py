"""The mesh under its policy beside vLLM on both cores and SMG with two vLLM engines, asked the same at the same rates.

The requests are those of `make bench-capacity`: prompts of about 420 tokens, 64 out, TTFT within 500 ms, TPOT within 40 ms. Its
code sets the peers up. Each system runs alone, and each window is kept once it was measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from benchmarks.capacity.probes import SEED, Plan, Probes
from benchmarks.harness import MODEL, Figure, Kept, Options, say
from benchmarks.peers.environments import PeerError
from benchmarks.peers.systems import SYSTEMS, System
from benchmarks.router.meshes import MESH, running
from pdmesh.loadtest.measure import trial_of, window_at
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.target import Target
from pdmesh.models.catalogue import ModelError

RATES = (1.0, 2.0, 3.0, 4.0)
OURS, PEERS, GOAL = "mesh", ("vllm", "smg"), 2.0
WINDOWS = Plan(duration_s=24.0, warmup_s=3.0)
QUICK_WINDOWS = Plan(duration_s=4.0, warmup_s=1.0)


@asynccontextmanager
async def _mesh(options: Options) -> AsyncIterator[Target]:
    """With words, as the peers are asked."""
    async with running(MESH, options) as system:
        target = GrpcTarget(system.mesh.router_address, GrpcSettings(prompt="words"))
        try:
            yield target
        finally:
            await target.close()


def _systems(options: Options) -> list[System]:
    """Ours first; a quick look does not fetch the others."""
    ours = System(OURS, MESH.name, "the policy chooses", "make bench-router", partial(_mesh, options))
    return [ours, *(system for system in SYSTEMS if system.key in PEERS and not options.quick)]


async def _goodputs(system: System, options: Options) -> dict[float, float]:
    """Requests per second that kept the objectives, by offered rate. Raises PeerError if it cannot take part."""
    plan = QUICK_WINDOWS if options.quick else WINDOWS
    found = {}
    async with Probes(system, options.folder / "peers") as probes:
        for rate in RATES if not options.quick else RATES[:1]:
            measured = await probes.run(window_at(plan.measurement(system.name, MODEL), rate, SEED))
            if measured.interrupted:
                raise asyncio.CancelledError
            found[rate] = trial_of(rate, measured).goodput
            say(f"{system.name}: {rate:g} requests/s: {found[rate]:.3g} good")
    return found


def figures_of(goodputs: Mapping[str, Mapping[float, float]], names: Mapping[str, str]) -> list[Figure]:
    """By system's key and offered rate. Compared is the best goodput of each at any of the rates. Pure."""
    best = {key: max(by_rate.values()) for key, by_rate in goodputs.items()}
    listed = []
    for key in goodputs:
        if key != OURS and OURS in best:
            shown = best[OURS] / best[key] if best[key] else f"{best[OURS]:.3g} requests/s against none"
            name = f"{names[OURS]} over {names[key]}: best goodput"
            listed.append(Figure(name, shown, "times", "higher", GOAL, peer=names[key]))
    return listed + [
        Figure(f"{names[key]}: goodput at {rate:g} requests/s", goodput, "requests/s", "higher", limit=rate)
        for key, by_rate in goodputs.items()
        for rate, goodput in by_rate.items()
    ]


async def figures(options: Options) -> list[Figure]:
    """Of all that can take part; why another could not is said, and a figure of it."""
    goodputs: dict[str, dict[float, float]] = {}
    absent: list[Figure] = []
    systems = _systems(options)
    for system in systems:
        try:
            goodputs[system.key] = await _goodputs(system, options)
        except (PeerError, ModelError, OSError) as error:
            say(f"{system.name}: could not take part: {error}")
            absent.append(Figure(f"{system.name}: goodput", f"could not take part: {error}", "requests/s", "higher"))
    Kept(options.folder / "peers").forget()
    return [*figures_of(goodputs, {system.key: system.name for system in systems}), *absent]
