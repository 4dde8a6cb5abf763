"""How many requests a second one core simulates, of a large mesh with the real router and the autoscaler on it."""

from __future__ import annotations

import gc
import time
from itertools import islice

from autoscaler.settings import AutoscalerSettings, PoolSettings
from autoscaler.views import PoolName
from benchmarks.autoscale.options import Options
from benchmarks.harness import Figure, say
from planning.latency_model import LatencyModel
from planning.objectives import ModelObjective
from router.places import AdmissionSettings
from simulator.autoscaling import Autoscaled, OwnScaler, goals_of
from simulator.ledger import MODEL
from simulator.results import Results
from simulator.settings import MeshSettings
from simulator.traces import log_normal, poisson
from simulator.worker_spec import KNOWN_STEPS, WorkerSpec

GOAL = 1_000_000 / 300
SPEC = WorkerSpec(
    LatencyModel(4e-3, 5e-5, 2e-9, 1e-4, 1e-8, num_steps=KNOWN_STEPS),
    max_num_batched_tokens=2048,
    max_num_seqs=256,
    num_blocks=30_000,
)
RATE_PER_S, NUM_WORKERS = 2000.0, 500


def figures(options: Options) -> list[Figure]:
    """A million requests would take minutes: a part of them tells the speed."""
    num_requests = int(options.pick(100_000, 2_000))
    objective = ModelObjective(MODEL, 1000, 40, 0.99)
    mesh = MeshSettings(objective=objective, admission=AdmissionSettings(max_inflight=100_000, max_queued=100_000))
    pool = PoolSettings(max_replicas=4 * NUM_WORKERS)
    scaler = OwnScaler(AutoscalerSettings(prefill=pool, decode=pool), goals_of(objective))
    results = Results()
    scaled = Autoscaled(mesh, results, {PoolName.PREFILL: SPEC, PoolName.DECODE: SPEC}, scaler)
    scaled.start({PoolName.PREFILL: NUM_WORKERS // 2, PoolName.DECODE: NUM_WORKERS // 2})
    arrivals = list(islice(poisson(RATE_PER_S, log_normal(1024, 128, 0.8), seed=1), num_requests))
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    began_s = time.perf_counter()
    scaled.run(arrivals)
    took_s = time.perf_counter() - began_s
    say(f"{num_requests} requests in {took_s:.1f} s, {results.total.attainment:.2%} kept their objectives")
    name = f"requests simulated in a second of one core, {NUM_WORKERS} workers at the start, autoscaled"
    return [Figure(name, num_requests / took_s, "requests/s", "higher", goal=GOAL)]
