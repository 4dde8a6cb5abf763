"""What routers and workers tell, as tests need it."""

from __future__ import annotations

from pdmesh.autoscaler.collect.traffic import Counts
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from pdmesh.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL

P, D = ROLE_PREFILL, ROLE_DECODE


def counts(arrived: float, up_s: float = 1000.0, **fields: float) -> Counts:
    """Of requests of 100 tokens that got 10 each."""
    usual: dict[str, float] = {
        "input_tokens": 100 * arrived, "input_squared": 1e4 * arrived, "num_answered": arrived, "output_tokens": 10 * arrived,
        "output_squared": 100 * arrived, "answered_input_tokens": 100 * arrived,
    }  # fmt: skip
    return Counts(up_s=up_s, num_arrived=arrived, **(usual | fields))  # type: ignore[arg-type]


def worker(
    name: str,
    roles: tuple[worker_pb2.Role.ValueType, ...],
    home: tuple[worker_pb2.Role.ValueType, ...] | None = None,
    *,
    epoch: int = 1,
    alive: bool = True,
    draining: bool = False,
    busy: int = 0,
    free: int = 100,
    age_ms: int = 0,
    fixed_s: float = 0.01,
    model: str = "m",
) -> mesh_pb2.WorkerStatus:
    info = worker_pb2.WorkerInfo(
        worker_id=name, epoch=epoch, address=f"{name}:1", roles=roles, home_roles=roles if home is None else home,
        identity=common_pb2.Identity(model=model, weights_hash="w"),
        layout=common_pb2.KVLayout(block_size=16), max_num_seqs=8, num_blocks=100,
        max_num_batched_tokens=512,
    )  # fmt: skip
    load = worker_pb2.LoadReport(
        roles=roles, draining=draining, num_running=busy, num_free_blocks=free, num_total_blocks=100,
        latency_model=worker_pb2.LatencyModel(fixed_s=fixed_s, per_prefill_token_s=1e-4, num_steps=9),
    )  # fmt: skip
    return mesh_pb2.WorkerStatus(info=info, load=load, alive=alive, report_age_ms=age_ms)


def status(*workers: mesh_pb2.WorkerStatus) -> mesh_pb2.GetStatusResponse:
    return mesh_pb2.GetStatusResponse(workers=workers)
