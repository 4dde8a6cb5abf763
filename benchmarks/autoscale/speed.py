"""How many requests a second one core simulates, of a large mesh with the real router and the autoscaler on it: compiled, where
that was done (`python -m pdmesh.simulator.compiled`), and interpreted; and whether both simulate the same.

Each run has a process to itself, which says before anything is imported whether it uses what is compiled.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from benchmarks.autoscale.scenario import Options
from benchmarks.harness import Figure, say
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import PoolName
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator import compiled
from pdmesh.simulator.arrivals import log_normal, poisson
from pdmesh.simulator.autoscaling import Autoscaled, OwnScaler, goals_of
from pdmesh.simulator.request import End, Request
from pdmesh.simulator.results import Results
from pdmesh.simulator.routers.routing import MODEL
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers.spec import KNOWN_STEPS, WorkerSpec
from router.flow_control.capacity import AdmissionSettings

GOAL = 1_000_000 / 300
SPEC = WorkerSpec(
    LatencyModel(4e-3, 5e-5, 2e-9, 1e-4, 1e-8, num_steps=KNOWN_STEPS),
    max_num_batched_tokens=2048,
    max_num_seqs=256,
    num_blocks=30_000,
)
RATE_PER_S, NUM_WORKERS = 2000.0, 500

Ended = tuple[float, str, float, float | None, float | None]
"""Of a request: arrival, how it ended, when; TTFT and TPOT. Seconds."""


@dataclass(frozen=True)
class Load:
    """So many requests, on so many workers at the start; routers let `max_inflight` in, and as many wait."""

    num_requests: int
    rate_per_s: float = RATE_PER_S
    num_workers: int = NUM_WORKERS
    max_inflight: int = 100_000


@dataclass(frozen=True)
class Run:
    """`took_s` of this machine."""

    is_compiled: bool
    took_s: float
    attainment: float
    ended: list[Ended]


def figures(options: Options) -> list[Figure]:
    """A million requests would take minutes: a part of them tells the speed."""
    large = Load(int(options.pick(100_000, 2_000)))
    fast, slow = _alone(large), _alone(Load(large.num_requests // 5), interpreted=True)
    name = f"requests simulated in a second of one core, {NUM_WORKERS} workers at the start, autoscaled"
    speeds = [
        Figure(name, large.num_requests / fast.took_s, "requests/s", "higher", goal=GOAL),
        Figure(f"{name}: interpreted", large.num_requests / 5 / slow.took_s, "requests/s", "higher"),
    ]
    if not fast.is_compiled:
        say("nothing is compiled, so nothing is compared: python -m pdmesh.simulator.compiled")
        return speeds
    # Too few workers: requests wait, a third is refused, and after a minute pods come.
    tight = Load(int(options.pick(18_000, 2_000)), 250.0, 16, max_inflight=400)
    num_apart = apart(_alone(tight).ended, _alone(tight, interpreted=True).ended)
    return [
        *speeds,
        Figure("requests whose end differs between compiled and interpreted", num_apart, "requests", "lower", goal=0),
    ]


def apart(one: list[Ended], other: list[Ended]) -> int:
    """Of two runs on one load, requests that did not end alike, bit for bit."""
    ends, others = {ended[0]: ended for ended in one}, {ended[0]: ended for ended in other}
    return sum(ends.get(at_s) != others.get(at_s) for at_s in ends | others)


def _alone(load: Load, *, interpreted: bool = False) -> Run:
    context = multiprocessing.get_context("spawn")
    initializer = None if interpreted else compiled.use
    with ProcessPoolExecutor(1, mp_context=context, initializer=initializer) as pool:
        run = pool.submit(play, load).result()
    how = "compiled" if run.is_compiled else "interpreted"
    say(f"{how}: {load.num_requests} requests in {run.took_s:.1f} s, {run.attainment:.2%} kept their objectives")
    return run


def play(load: Load) -> Run:
    """Simulates it in this process."""
    objective = ModelObjective(MODEL, 1000, 40, 0.99)
    admission = AdmissionSettings(max_inflight=load.max_inflight, max_queued=load.max_inflight)
    pool = PoolSettings(max_replicas=4 * NUM_WORKERS)
    scaler = OwnScaler(AutoscalerSettings(prefill=pool, decode=pool), goals_of(objective))
    audience, specs = _Audience(), {PoolName.PREFILL: SPEC, PoolName.DECODE: SPEC}
    scaled = Autoscaled(MeshSettings(objective=objective, admission=admission), audience, specs, scaler)
    scaled.start({PoolName.PREFILL: load.num_workers // 2, PoolName.DECODE: load.num_workers // 2})
    arrivals = list(islice(poisson(load.rate_per_s, log_normal(1024, 128, 0.8), seed=1), load.num_requests))
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    began_s = time.perf_counter()
    scaled.run(arrivals)
    took_s = time.perf_counter() - began_s
    is_compiled = compiled.use()  # by now too late to say so: it tells whether somebody did before the imports
    return Run(is_compiled, took_s, audience.results.total.attainment, audience.ends)


@dataclass
class _Audience:
    """Results, and the end of each request."""

    results: Results = field(default_factory=Results)
    ends: list[Ended] = field(default_factory=list)

    def arrived(self, request: Request) -> None:
        self.results.arrived(request)

    def ended(self, request: Request, end: End, now: float) -> None:
        self.results.ended(request, end, now)
        self.ends.append((request.arrival.at_s, end.name, now, request.ttft_s, request.tpot_s))
