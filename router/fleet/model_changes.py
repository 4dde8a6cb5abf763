"""Changes to all workers of a model while they serve: other weights, pause, sleep and wake.

What reinforcement learning asks of a mesh: after each step of training the weights change, and while it trains on the same
machine, the workers sleep. The workers hold the state; a router tells all of them at the same time, and the others read it in
heartbeats. A worker that comes later, or comes back, is told what the others were told last, before it gets a request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import grpc
import grpc.aio

from pdmesh.runtime.errors import Aborted, FailedPrecondition, InvalidArgument, MeshError, Unavailable, error_from_rpc
from pdmesh.runtime.registry.shared_settings import SharedSettings
from pdmesh.runtime.rpc.fan_out import FanOut
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.fleet.change_notifier import ChangeNotifier, unless
from router.fleet.following import alive_workers
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.routing.worker_snapshot import WorkerKey

CALL_TIMEOUT_S = 600.0
SEND_TIMEOUT_S = 6 * 3600.0
MAX_FOLDER_CHARS = 4096
DEFAULT_FINISH_S = 30.0
PERIOD_S, FIRST_READ_S = 1.0, 2.0
SERVING_STATES = RUNNING, PAUSED, ASLEEP = (
    worker_pb2.SERVING_STATE_RUNNING,
    worker_pb2.SERVING_STATE_PAUSED,
    worker_pb2.SERVING_STATE_ASLEEP,
)

_CANNOT = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)

logger = logging.getLogger(__name__)
T = TypeVar("T")
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
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await self._wanted.refresh()
        self._fleet.on_arrival = self._arrived
        self._keeper = asyncio.create_task(self._keep_forever(), name="keep serving states")

    async def stop(self) -> None:
        """Stop; what was told stays in Redis."""
        self._fleet.on_arrival = None
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

    async def _keep_forever(self) -> None:
        while True:
            try:
                await self._wanted.refresh()
                self._keep()
            except Exception:  # a bug with one worker must not stop the keeper
                logger.exception("keeping the workers' serving states failed")
            await asyncio.sleep(PERIOD_S)

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
                    said = await self._tell(worker, state)
                except grpc.aio.AioRpcError as error:
                    said = None  # it may have done it all the same
                    name = worker_pb2.ServingState.Name(state)
                    logger.warning("%s has come and is to be %s, as its model: %s", worker.address, name, error.details())
                    if error.code() in _CANNOT and state != RUNNING:
                        return
                    await asyncio.sleep(PERIOD_S)
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


class ModelChanges:
    """Change all workers of a model that are here, all at the same time."""

    def __init__(
        self, fleet: FleetRegistry, keeper: ServingKeeper, *, may_change: bool, abort: Callable[[str, int], None]
    ) -> None:
        """`keeper` tells workers that come later. `may_change`: clients may change weights. `abort(model, abort_id)` ends this
        router's requests of a model, once for each id."""
        self._fleet, self._keeper, self._may_change, self._abort = fleet, keeper, may_change, abort

    async def update_weights(self, model: str, folder: str) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Have the workers load the weights and compute with them; between two of them that differ there is no hand-off. A worker
        that could not goes on with its own, apart from the others. Raises MeshError where none could."""
        self._check_may()
        if not folder or len(folder) > MAX_FOLDER_CHARS:
            raise InvalidArgument("folder", f"has {len(folder)} characters; give a folder as the workers see it")

        async def update(worker: Worker) -> worker_pb2.UpdateWeightsResponse:
            request = worker_pb2.UpdateWeightsRequest(folder=folder)
            done = await worker.control.UpdateWeights(request, timeout=CALL_TIMEOUT_S)
            worker.has_weights(done.identity.weights_hash)  # a request that comes now is not to wait for its next report
            return done

        return _told_weights(await self._all(model, update))

    async def send_weights(
        self, model: str, messages: AsyncIterator[worker_pb2.SendWeightsRequest]
    ) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Pass the files of weights on to the workers while they come, as fast as the slowest of them takes them, and have them
        compute with these. Raises MeshError where none could."""
        self._check_may()
        fan_out = FanOut[worker_pb2.SendWeightsRequest]()
        readers = {worker: fan_out.reader() for worker in self._reachable(model)}

        async def send(worker: Worker) -> worker_pb2.UpdateWeightsResponse:
            done = await worker.control.SendWeights(readers[worker], timeout=SEND_TIMEOUT_S)
            worker.has_weights(done.identity.weights_hash)
            return done

        passing = asyncio.create_task(fan_out.run(messages), name="pass weights on")
        try:
            return _told_weights(await self._all(model, send, lambda worker: readers[worker].close()))
        finally:
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)

    def _check_may(self) -> None:
        if not self._may_change:
            remedy = "this router lets no client change adapters or weights; start it with --adapter-changes on"
            raise FailedPrecondition("folder", remedy)

    async def set_serving(self, model: str, serving: worker_pb2.SetServingRequest) -> mesh_pb2.MeshSetServingResponse:
        """Have the workers run, pause or sleep. Raises MeshError where none could."""
        if serving.state not in SERVING_STATES:
            raise InvalidArgument("serving.state", f"{serving.state} is none of RUNNING, PAUSED and ASLEEP")
        serving.abort_id = random.getrandbits(63) + 1 if serving.abort_running else 0
        timeout_s = CALL_TIMEOUT_S + (serving.timeout_ms / 1000 or DEFAULT_FINISH_S if serving.finish_running else 0.0)

        async def change(worker: Worker) -> worker_pb2.SetServingResponse:
            done = await worker.control.SetServing(serving, timeout=timeout_s)
            self._keeper.told(worker, done.state)
            return done

        self._reachable(model)
        before = self._keeper.wanted(model)
        await self._keeper.want(model, serving.state)
        try:
            answers = await self._all(model, change)
        except MeshError as error:
            if not isinstance(error, Aborted) and self._keeper.wanted(model) == serving.state:  # else a newer call has come
                await self._keeper.want(model, before)
            raise
        told = []
        for worker, answer in answers:
            if isinstance(answer, MeshError):
                told.append(mesh_pb2.WorkerServing(worker_id=worker_id_of(worker), error=answer.message))
            else:
                told.append(mesh_pb2.WorkerServing(worker_id=worker_id_of(worker), serving=answer))
        if serving.abort_running:  # reports may have said so before; what comes from now on waits
            self._abort(model, serving.abort_id)
        return mesh_pb2.MeshSetServingResponse(workers=told)

    def serving_states(self, model: str) -> list[worker_pb2.ServingState.ValueType]:
        """Return the states of the workers that are here."""
        return [each.current.load.serving_state for each in self._known(model) if each.current is not None]

    async def _all(
        self,
        model: str,
        call: Callable[[Worker], Coroutine[object, object, T]],
        ended: Callable[[Worker], None] = lambda _worker: None,
    ) -> Sequence[tuple[Worker, T | MeshError]]:
        """Return what each worker of the model answered, those out of reach included; `ended` is called when one has, or is lost.
        Raises the MeshError of the first where all failed."""
        workers = self._reachable(model)
        answers = await asyncio.gather(*(_answer(worker, call, ended) for worker in workers))
        failed = [answer for answer in answers if isinstance(answer, MeshError)]
        if len(failed) == len(answers):
            raise failed[0]
        others = (each for each in self._known(model) if each not in workers)
        return [*zip(workers, answers, strict=True), *((each, _away()) for each in others)]

    def _known(self, model: str) -> list[Worker]:
        return [each for each in self._fleet.workers.values() if each.last and each.last.info.identity.model == model]

    def _reachable(self, model: str) -> list[Worker]:
        """Return the workers of the model that are here. Raises Unavailable where there is none."""
        workers = [each for each in self._known(model) if each.current is not None]
        if not workers:
            raise Unavailable(f"no worker of {model!r} is reachable")
        return workers


def _told_weights(
    answers: Iterable[tuple[Worker, worker_pb2.UpdateWeightsResponse | MeshError]],
) -> mesh_pb2.MeshUpdateWeightsResponse:
    told = []
    for worker, answer in answers:
        message = mesh_pb2.WorkerWeights(worker_id=worker_id_of(worker))
        if isinstance(answer, MeshError):
            message.error = answer.message
        else:
            message.weights_hash, message.pause_s = answer.identity.weights_hash, answer.pause_s
        told.append(message)
    hashes = Counter(message.weights_hash for message in told if not message.error)
    return mesh_pb2.MeshUpdateWeightsResponse(weights_hash=hashes.most_common(1)[0][0], workers=told)


async def _answer(
    worker: Worker, call: Callable[[Worker], Coroutine[object, object, T]], ended: Callable[[Worker], None]
) -> T | MeshError:
    """Return what the worker answers, or why it does not: one that is lost is not waited for."""
    try:
        if worker.current is None:
            return _away()
        return await unless(worker.current.lost, call(worker)) or _away()
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    finally:
        ended(worker)


def _away() -> MeshError:
    return Unavailable("not reachable: it is as it was, if it comes back")


def worker_id_of(worker: Worker) -> str:
    """Return its id; empty while it was never heard."""
    return "" if worker.last is None else worker.last.info.worker_id
