"""What the policy predicts when it places a request, beside what came, after a minute of mixed traffic."""

from __future__ import annotations

from benchmarks.harness import Figure, Options, say
from benchmarks.router.meshes import MESH, load_of, running, warm_up, window
from pdmesh.client.client import AsyncClient
from pdmesh.loadtest.arrivals import Distribution
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.workload import Arrivals, TrafficClass, Workload
from pdmesh.v1.mesh_pb2 import GetStatusResponse

TTFT_GOAL, TPOT_GOAL = 0.10, 0.05
MINUTE_S, QUICK_S = 60.0, 8.0
TRAFFIC = Workload(
    arrivals=Arrivals(rate=1.0),
    classes=(
        TrafficClass(
            "chat", 3, input_tokens=Distribution("uniform", (32, 300)), output_tokens=Distribution("uniform", (32, 128))
        ),
        TrafficClass(
            "task", 2, input_tokens=Distribution("uniform", (300, 900)), output_tokens=Distribution("uniform", (16, 64))
        ),
        TrafficClass(
            "paper", 1, input_tokens=Distribution("uniform", (900, 2500)), output_tokens=Distribution("uniform", (16, 64))
        ),
    ),
)


def figures_of(status: GetStatusResponse) -> list[Figure]:
    """Medians as the router has them, and how well the workers' own models fit their steps. Pure."""
    seen = status.prediction
    compared = "median of |predicted - observed| / observed"
    ttft = seen.ttft_error if seen.num_requests else "no request was compared"
    tpot = seen.tpot_error if seen.num_requests else "no request was compared"
    listed = [
        Figure(f"TTFT predicted when the request was placed: {compared}", ttft, "share", "lower", TTFT_GOAL),
        Figure(f"TPOT predicted when the request was placed: {compared}", tpot, "share", "lower", TPOT_GOAL),
        Figure("requests compared", seen.num_requests, "requests", "higher"),
    ]
    for worker in status.workers:
        if worker.load.HasField("latency_model"):
            name, model = worker.info.worker_id, worker.load.latency_model
            listed += [
                Figure(f"{name}: step with prompt tokens: {compared}", model.prefill_error, "share", "lower"),
                Figure(f"{name}: step without prompt tokens: {compared}", model.decode_error, "share", "lower"),
                Figure(f"{name}: steps that its model was fitted to", model.num_steps, "steps", "higher"),
            ]
    return listed


async def figures(options: Options) -> list[Figure]:
    """A minute of traffic, then what the router says of it."""
    async with running(MESH, options) as system:
        await warm_up(system.target, 1.0)
        load = load_of(TRAFFIC, ObjectiveBook(Objectives()), 51, options.pick(MINUTE_S, QUICK_S), warmup_s=0.0)
        summary = (await window(system.target, load)).summary
        say(f"prediction: {summary.num_requests} requests, {dict(summary.outcomes)}")
        async with AsyncClient(system.mesh.router_address) as client:
            return figures_of(await client.status(timeout=5.0))
