"""Changes to all workers of a model while they serve: other weights, pause, sleep and wake.

What reinforcement learning asks of a mesh: after each step of training the weights change, and while it trains on the same
machine, the workers sleep. The workers hold the state; a router tells all of them at the same time, and the others read it in
heartbeats. A worker that comes later, or comes back, is told what the others were told last, before it gets a request.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import TypeVar

import grpc.aio

from pdmesh.runtime.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MeshError,
    Unavailable,
    error_from_rpc,
)
from pdmesh.runtime.rpc.fan_out import FanOut
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.fleet.change_notifier import unless
from router.fleet.model_changes.serving import CALL_TIMEOUT_S, SERVING_STATES, ServingKeeper
from router.fleet.model_changes.weights import MAX_FOLDER_CHARS, WeightsKeeper
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker

SEND_TIMEOUT_S = 6 * 3600.0
DEFAULT_FINISH_S = 30.0

T = TypeVar("T")


class ModelChanges:
    """Change all workers of a model that are here, all at the same time."""

    def __init__(
        self,
        fleet: FleetRegistry,
        serving: ServingKeeper,
        weights: WeightsKeeper,
        *,
        may_change: bool,
        abort: Callable[[str, int], None],
    ) -> None:
        """The two keepers tell workers that come later. `may_change`: clients may change weights. `abort(model, abort_id)` ends
        this router's requests of a model, once for each id."""
        self._fleet, self._serving, self._weights = fleet, serving, weights
        self._may_change, self._abort = may_change, abort

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

        workers = self._reachable(model)
        return await asyncio.shield(self._weights.lasting(self._replace(model, folder, workers, update)))

    async def send_weights(
        self, model: str, messages: AsyncIterator[worker_pb2.SendWeightsRequest]
    ) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Pass the files of weights on to the workers while they come, as fast as the slowest of them takes them, and have them
        compute with these. Raises MeshError where none could."""
        self._check_may()
        fan_out = FanOut[worker_pb2.SendWeightsRequest]()
        workers = self._reachable(model)
        readers = {worker: fan_out.reader() for worker in workers}

        async def send(worker: Worker) -> worker_pb2.UpdateWeightsResponse:
            done = await worker.control.SendWeights(readers[worker], timeout=SEND_TIMEOUT_S)
            worker.has_weights(done.identity.weights_hash)
            return done

        passing = asyncio.create_task(fan_out.run(messages), name="pass weights on")
        replacing = self._weights.lasting(
            self._replace(model, "", workers, send, lambda worker: readers[worker].close(), may_go_on=passing.done)
        )
        try:
            return await asyncio.shield(replacing)
        finally:
            if not passing.done():  # workers refuse what has no end
                replacing.cancel()
                await asyncio.gather(replacing, return_exceptions=True)
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)

    async def _replace(
        self,
        model: str,
        folder: str,
        workers: Sequence[Worker],
        call: Callable[[Worker], Coroutine[object, object, worker_pb2.UpdateWeightsResponse]],
        ended: Callable[[Worker], None] = lambda _worker: None,
        *,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> mesh_pb2.MeshUpdateWeightsResponse:
        """Have the workers replace their weights, and remember by what. Meanwhile nothing is wanted of those that come: their own
        weights may be the new ones. Nor is it where the workers may replace them although this ends: `may_go_on`, or they took
        too long to answer."""
        async with self._weights.changing(model):
            before = self._weights.replacement(model)
            present = _weights_of(workers)
            pending = before.pending(present)
            await self._weights.put(model, pending)
            try:
                told = _told_weights(await self._all(model, workers, call, ended))
            except BaseException as error:
                is_open = isinstance(error, DeadlineExceeded) or (isinstance(error, asyncio.CancelledError) and may_go_on())
                if not is_open and self._weights.replacement(model) == pending:  # else another router has replaced them
                    await self._weights.put(model, before)
                raise
            await self._weights.put(model, self._weights.replacement(model).by(folder, told.weights_hash, present))
            return told

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
            self._serving.told(worker, done.state)
            return done

        workers = self._reachable(model)
        before = self._serving.wanted(model)
        await self._serving.want(model, serving.state)
        try:
            answers = await self._all(model, workers, change)
        except MeshError as error:
            is_open = isinstance(error, Aborted | DeadlineExceeded)  # a newer call has come, or they are at it still
            if not is_open and self._serving.wanted(model) == serving.state:
                await self._serving.want(model, before)
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
        workers: Sequence[Worker],
        call: Callable[[Worker], Coroutine[object, object, T]],
        ended: Callable[[Worker], None] = lambda _worker: None,
    ) -> Sequence[tuple[Worker, T | MeshError]]:
        """Return what each worker answered, and others of the model as out of reach; `ended` is called when one has, or is lost.
        Raises the MeshError of the first where all failed."""
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


def _weights_of(workers: Iterable[Worker]) -> list[str]:
    """Return the hashes that they have, and those that they began with: others of their deployment come with the latter."""
    alive = [worker.current for worker in workers if worker.current is not None]
    return [weights for each in alive for weights in (each.first_weights, each.info.identity.weights_hash)]


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
