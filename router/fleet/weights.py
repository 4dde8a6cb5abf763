"""Other weights for all workers of a model, while they serve: what reinforcement learning asks of a mesh after each step."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc.aio

from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, MeshError, Unavailable, error_from_rpc
from pdmesh.v1 import mesh_pb2
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker

CALL_TIMEOUT_S = 600.0
MAX_FOLDER_CHARS = 4096


class FleetWeights:
    """Change the weights of all workers of a model."""

    def __init__(self, fleet: FleetRegistry, *, may_change: bool) -> None:
        """`may_change`: clients may change them."""
        self._fleet, self._may_change = fleet, may_change

    async def update(self, model: str, folder: str) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Have all workers that are here load the weights and compute with them, all at the same time: between two of them there
        is no hand-off. A worker that could not goes on with its own, apart from the others. Raises MeshError where none could."""
        if not self._may_change:
            remedy = "this router lets no client change adapters or weights; start it with --adapter-changes on"
            raise FailedPrecondition("folder", remedy)
        if not folder or len(folder) > MAX_FOLDER_CHARS:
            raise InvalidArgument("folder", f"has {len(folder)} characters; give a folder as the workers see it")
        known = [each for each in self._fleet.workers.values() if each.last and each.last.info.identity.model == model]
        workers = [each for each in known if each.current is not None]
        if not workers:
            raise Unavailable(f"no worker of {model!r} is reachable")
        results = await asyncio.gather(*(self._update(worker, folder) for worker in workers))
        errors = [error for _, error in results if error is not None]
        if len(errors) == len(results):
            raise errors[0]
        told = [message for message, _ in results]
        told += [_unreachable(each) for each in known if each.current is None]
        hashes = Counter(message.weights_hash for message in told if not message.error)
        return mesh_pb2.MeshUpdateWeightsResponse(weights_hash=hashes.most_common(1)[0][0], workers=told)

    async def _update(self, worker: Worker, folder: str) -> tuple[mesh_pb2.WorkerWeights, MeshError | None]:
        known = worker.last
        told = mesh_pb2.WorkerWeights(worker_id="" if known is None else known.info.worker_id)
        try:
            done = await worker.update_weights(folder, CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as failed:
            error = error_from_rpc(failed)
            told.error = error.message
            return told, error
        told.weights_hash, told.pause_s = done.identity.weights_hash, done.pause_s
        worker.has_weights(told.weights_hash)  # a request that comes from now on is not to wait for its next report
        return told, None


def _unreachable(worker: Worker) -> mesh_pb2.WorkerWeights:
    worker_id = "" if worker.last is None else worker.last.info.worker_id
    return mesh_pb2.WorkerWeights(worker_id=worker_id, error="not reachable: it has the weights that it had, if it comes back")
