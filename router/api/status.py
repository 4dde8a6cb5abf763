"""The router's view of the mesh as messages: models and status."""

import time
from collections.abc import Iterator, Sequence

from pdmesh.planning.objectives import ModelObjective
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from router.context import RouterContext
from router.fleet.circuit_breaker import BreakerStatuses, Role
from router.fleet.worker import Worker
from router.flow_control.capacity import Tally
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot
from router.telemetry.traffic import traffic_status


def models(core: RouterContext) -> mesh_pb2.ListModelsResponse:
    """Return the models served here, with the workers that take requests for them now."""
    views = core.fleet.views()
    infos = [
        mesh_pb2.ModelInfo(
            name=model.name,
            max_context=core.max_context(model),
            num_prefill_workers=sum(view.prefill for view in views if view.model == model.name),
            num_decode_workers=sum(view.decode for view in views if view.model == model.name),
            sampling_defaults=common_pb2.SamplingParams(**model.sampling_defaults) if model.sampling_defaults else None,  # type: ignore[arg-type]
        )
        for model in core.models.values()
    ]
    return mesh_pb2.ListModelsResponse(models=[*infos, *_adapters(core, views)])


def _adapters(core: RouterContext, views: Sequence[WorkerSnapshot]) -> Iterator[mesh_pb2.ModelInfo]:
    """Yield the LoRA adapters, with the workers that have them."""
    for model, name in core.adapters.names(core.models):
        holders = [view for view in views if view.model == model and any(each.name == name for each in view.adapters)]
        yield mesh_pb2.ModelInfo(
            name=name,
            max_context=core.max_context(core.models[model]),
            num_prefill_workers=sum(view.prefill for view in holders),
            num_decode_workers=sum(view.decode for view in holders),
            base_model=model,
        )


def status(core: RouterContext, objectives: Sequence[ModelObjective], *, registry_connected: bool) -> mesh_pb2.GetStatusResponse:
    """Return the workers with their circuit breakers, admission counts, objectives and traffic."""
    now = time.monotonic()
    breakers = BreakerStatuses(core.health_recorder, core.fleet.fleet_snapshot, now)
    admission = core.flow_control.admission
    return mesh_pb2.GetStatusResponse(
        router_id=core.router_id,
        workers=[_worker(worker, breakers, now) for worker in core.fleet.workers.values()],
        num_inflight=admission.num_inflight,
        num_queued=admission.num_queued,
        max_inflight=admission.max_inflight,
        max_queued=admission.max_queued,
        registry_connected=registry_connected,
        objectives=[
            mesh_pb2.Objective(model=goal.model, ttft_ms=goal.ttft_ms, tpot_ms=goal.tpot_ms, quantile=goal.quantile)
            for goal in objectives
        ],
        admission=[_tally(*key, tally) for key, tally in sorted(admission.limiter.counts.tallies.items())],
        num_token_mismatches=core.num_token_mismatches,
        num_redrawn_tokens=core.num_redrawn_tokens,
        prediction=core.decisions.status(),
        traffic=traffic_status(core.traffic, now),
        epoch=core.epoch,
        num_processes=core.config.sharers,
        splits=core.rollouts.described(core.models, failing(core)),
    )


def failing(core: RouterContext) -> frozenset[WorkerKey]:
    """Return the workers that are ejected since requests failed there."""
    health = core.health_recorder.health
    return frozenset((*health.failing(Role.DECODE), *health.failing(Role.PREFILL)))


def _tally(tenant: str, priority: int, tally: Tally) -> mesh_pb2.AdmissionStatus:
    return mesh_pb2.AdmissionStatus(
        tenant=tenant,
        priority=common_pb2.Priority.ValueType(priority),
        num_inflight=tally.num_inflight,
        num_queued=tally.num_queued,
        num_admitted=tally.num_admitted,
        refused=[mesh_pb2.RefusalCount(reason=reason, count=count) for reason, count in sorted(tally.refused.items())],
    )


def _worker(worker: Worker, breakers: BreakerStatuses, now: float) -> mesh_pb2.WorkerStatus:
    """Return the status of one worker. A worker that has never answered is shown by its address."""
    last = worker.last
    if last is None:
        return mesh_pb2.WorkerStatus(info=worker_pb2.WorkerInfo(address=worker.address))
    info = worker_pb2.WorkerInfo()
    info.CopyFrom(last.info)
    info.ClearField("roles")
    info.roles.extend(last.load.roles)  # they may have changed since it registered
    age_ms = min(2**32 - 1, round((now - last.reported_at) * 1000))
    return mesh_pb2.WorkerStatus(
        info=info,
        load=last.load,
        alive=worker.current is not None,
        report_age_ms=age_ms,
        breakers=breakers.of((worker.address, info.epoch)),
        fetched_tokens=last.reuse.num_fetched_tokens,
        restored_tokens=last.reuse.num_restored_tokens,
        saved_s=last.reuse.saved_s,
    )
