"""A small task for the planner's tests: a slow worker, so that few requests a second need several of it."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.planner.meshes import AGGREGATED, SEPARATED, WorkerKind
from pdmesh.planner.plan import EFFORTS, Effort, Task
from pdmesh.planner.traffic import Traffic, traffic_of
from pdmesh.planning.devices import DEVICES
from pdmesh.planning.roofline import Decoder, Roofline
from pdmesh.simulator.config import SimulatorConfig
from tests.simulator.specs import LARGE

KIND = WorkerKind(LARGE)
LLAMA3_8B = Decoder(32, 4096, 14336, 32, 8, 128, 128256, 131072)
H100 = Roofline(DEVICES["h100-sxm"], LLAMA3_8B)


def config(rate: str = "20/s", requests: int = 300, ttft_ms: int = 400, tpot_ms: int = 20, **more: object) -> SimulatorConfig:
    """Of a generated load."""
    fields = {"input_tokens": 300, "output_tokens": 60, "rate": rate, "requests": requests, **more}
    return SimulatorConfig(speed="-", decode=1, ttft_ms=ttft_ms, tpot_ms=tpot_ms, **fields)  # type: ignore[arg-type]


def traffic(of: SimulatorConfig) -> Traffic:
    """Its arrivals."""
    return traffic_of(of.arrivals(LARGE.largest))


def task(
    of: SimulatorConfig,
    kinds: Sequence[WorkerKind] = (KIND,),
    meshes: tuple[str, ...] = (AGGREGATED, SEPARATED),
    *,
    quantile: float = 0.95,
    headroom: float = 0.0,
    max_cost: int = 0,
    effort: Effort = EFFORTS["normal"],
) -> Task:
    """To be planned."""
    return Task(traffic(of), tuple(kinds), of.mesh(), quantile, headroom, meshes, max_cost, effort)
