"""Paused and sleeping models: a worker that comes later, or comes back, is told what the others were told last."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeAlias

import grpc
import grpc.aio

from pdmesh.runtime.registry.shared_settings import SharedSettings
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.v1 import worker_pb2
from router.fleet.change_notifier import ChangeNotifier, unless
from router.fleet.following import alive_workers
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.routing.worker_snapshot import WorkerKey

CALL_TIMEOUT_S = 3600.0
AGAIN_AFTER_S = 1.0
SERVING_STATES = RUNNING, PAUSED, ASLEEP = (
    worker_pb2.SERVING_STATE_RUNNING,
    worker_pb2.SERVING_STATE_PAUSED,
    worker_pb2.SERVING_STATE_ASLEEP,
)

_CANNOT = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)

logger = logging.getLogger(__name__)
ServingState: TypeAlias = "worker_pb2.ServingState.ValueType"


class WantedServing(SharedSettings[str, ServingState]):
    """Hold by model what all of its workers were told last; `refresh` exchanges it with Redis."""

    def __init__(self, url: str = "", mesh: str = "default", secret: MeshSecret | None = None) -> None:
        """As SharedSettings: who may write to Redis could stop the mesh, so entries are sealed."""
        super().__init__(url, mesh, "serving", secret)
        self.is_shared = bool(url)

    def _dump(self, key: str, value: ServingState) -> tuple[str, str]:
        return key, worker_pb2.ServingState.Name(value)

    def _load(self, field: bytes, value: bytes) -> tuple[str, ServingState] | None:
        state = worker_pb2.ServingState.Value(value.decode())
        return (field.decode(), state) if state in SERVING_STATES else None


class ServingKeeper:
    """Tell workers that come what all others of their model were told, from `start` to `stop`.

    A worker that this router has told so, from what it knew then, is followed until its model runs: another router may have ended
    the pause at the same moment, and not known of the worker."""

    def __init__(self, fleet: FleetRegistry, wanted: WantedServing) -> None:
        """Nothing is done before `start`."""
        self._fleet, self._wanted = fleet, wanted
        self._early: list[Worker] = []  # those that came before Redis was read
        self._followers: dict[WorkerKey, asyncio.Task[None]] = {}
        self._stopped: dict[WorkerKey, str] = {}  # those that have said that they do not run, and their models
        self._changed = ChangeNotifier()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read what is known, for a moment, and look at every worker that comes from now on."""
        await self._wanted.read_first()
        self._fleet.on_arrival.append(self._arrived)
        self._keeper = asyncio.create_task(self._wanted.refresh_forever(self._keep), name="keep serving states")

    async def stop(self) -> None:
        """Stop; what was told stays in Redis."""
        if self._arrived in self._fleet.on_arrival:
            self._fleet.on_arrival.remove(self._arrived)
        tasks = [*self._followers.values(), *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._wanted.close()

    def wanted(self, model: str) -> ServingState:
        """Return what all workers of the model were told last."""
        return self._wanted.entries.get(model, RUNNING)

    async def want(self, model: str, state: ServingState) -> None:
        """Remember what all workers of the model are told now. It is written in any case: another router may have written since
        this one has read."""
        self._stopped = {key: other for key, other in self._stopped.items() if other != model}
        await self._wanted.put(model, state)
        self._changed.fire()

    def told(self, worker: Worker, state: ServingState) -> None:
        """Take over the state that a worker has said it is in."""
        worker.told_serving(state)
        if worker.current is not None and state != RUNNING:
            self._stopped[worker.address, worker.current.info.epoch] = _model_of(worker)

    def _arrived(self, worker: Worker) -> None:
        """Take a worker that runs where the others do not for one that does not either, and have it told so."""
        current = worker.current
        if current is None or current.load.serving_state != RUNNING:
            return
        if self._wanted.is_shared and not self._wanted.was_read:
            self._early.append(worker)
        state, key = self.wanted(current.info.identity.model), (worker.address, current.info.epoch)
        if state == RUNNING or key in self._followers:
            return
        worker.told_serving(state)
        task = self._followers[key] = asyncio.create_task(self._follow(worker, key), name=f"serving state of {worker.address}")
        task.add_done_callback(lambda _: self._followers.pop(key, None))

    def _keep(self) -> None:
        if self._early and self._wanted.was_read:
            early, self._early = self._early, []
            for worker in early:
                self._arrived(worker)
        alive = alive_workers(self._fleet)
        self._stopped = {key: model for key, model in self._stopped.items() if key in alive}
        if not self._wanted.is_shared:  # another router may have told them since
            for key, model in list(self._stopped.items()):
                if not alive[key].is_stopped:
                    self._wanted.forget(model)
        self._changed.fire()

    async def _follow(self, worker: Worker, key: WorkerKey) -> None:
        """Have the worker do what is wanted of its model until that runs, or the worker is lost or cannot."""
        said: ServingState | None = RUNNING
        while (current := worker.current) is not None and (worker.address, current.info.epoch) == key:
            change, state = self._changed.next, self.wanted(_model_of(worker))
            if state != said:
                try:
                    said = await unless(current.lost, self._tell(worker, state))
                except grpc.aio.AioRpcError as error:
                    said = None  # it may have done it all the same
                    name = worker_pb2.ServingState.Name(state)
                    logger.warning("%s has come and is to be %s, as its model: %s", worker.address, name, error.details())
                    if error.code() in _CANNOT and state != RUNNING:
                        return
                    await asyncio.sleep(AGAIN_AFTER_S)
                    continue
            if said == RUNNING:
                return
            await change.wait()

    async def _tell(self, worker: Worker, state: ServingState) -> ServingState:
        """Return `state` once the worker does it; one that cannot sleep pauses. Raises AioRpcError."""
        try:
            done = await worker.control.SetServing(worker_pb2.SetServingRequest(state=state), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if state != ASLEEP or error.code() not in _CANNOT or self.wanted(_model_of(worker)) != ASLEEP:
                raise
            done = await worker.control.SetServing(worker_pb2.SetServingRequest(state=PAUSED), timeout=CALL_TIMEOUT_S)
        self.told(worker, done.state)
        logger.info("%s has come and is %s, as its model", worker.address, worker_pb2.ServingState.Name(done.state))
        return state


def _model_of(worker: Worker) -> str:
    return "" if worker.last is None else worker.last.info.identity.model
