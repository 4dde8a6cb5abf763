"""Replaced weights: a worker that comes later, or comes back, with weights that were replaced gets what replaced them first.

    UpdateWeights(folder) ─► every worker of the model ─► Redis: folder, its hash, and the hashes of what it replaced
    a worker comes with one of those ─► no request goes to it ─► UpdateWeights(folder) there ─► it is one of the others

What was sent, and not read from a folder, workers keep while they compute with it: the one that comes finds it on its machine, or
it is passed on from another worker:

    UpdateWeights(sent_hash) there ─► NOT_FOUND ─► ReadWeights of a worker that has them ─► SendWeights there

A worker with weights that were never replaced is left alone: it is a new deployment, whose weights are newer than what was said.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from pdmesh.runtime.registry.shared_settings import SharedSettings
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.v1 import worker_pb2
from router.fleet.change_notifier import Signal, unless
from router.fleet.following import alive_workers
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.routing.worker_snapshot import WorkerKey

CALL_TIMEOUT_S = 3600.0
"""Of a load: 140 GB at 40 MB a second. A worker that is lost ends it sooner."""
ASLEEP_PERIOD_S = 1.0
"""Until a worker that sleeps is looked at again: asleep it loads nothing."""
AGAIN_AFTER_S = 10.0
"""A worker that could not be asked, or had no time, is asked again after this time."""
SOURCE_PERIOD_S, SOURCE_TRIES = 1.0, 5
"""How often a worker is looked for that has weights that were sent: this router may not know all of them yet."""
FULL_TRIES = 3
"""How often a worker whose disk has no room for them is tried: others may be receiving there as well."""
PASS_TIMEOUT_S, PIECE_TIMEOUT_S = 6 * 3600.0, 30.0
MAX_REPLACED, KEPT_FIRST = 64, 8
"""How many hashes are remembered; of these the first stay: what a deployment's workers start with is one of them."""
MAX_FOLDER_CHARS, MAX_HASH_CHARS = 4096, 256

_NOT_KEPT = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)  # the latter: of an earlier version, or damaged files
_CANNOT = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,  # a bug there does not go away, and must not take the worker away for good
    grpc.StatusCode.UNKNOWN,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replacement:
    """Say which weights a model's workers compute with since others were `replaced` (hashes), and the folder that they are in as
    the workers see it; empty: they were sent. Without `weights_hash`: nothing was replaced, or by what is being decided, and
    nothing is wanted of workers that come."""

    folder: str = ""
    weights_hash: str = ""
    replaced: tuple[str, ...] = ()

    def by(self, folder: str, weights_hash: str, present: Iterable[str]) -> Replacement:
        """Return what holds once the weights that are `present` on workers have been replaced, too."""
        now = dict.fromkeys(each for each in present if each not in ("", weights_hash))
        before = [each for each in self.replaced if each != weights_hash]
        first = before[:KEPT_FIRST]
        later = [*(each for each in before[KEPT_FIRST:] if each not in now), *(each for each in now if each not in first)]
        return Replacement(folder, weights_hash, (*first, *later[-(MAX_REPLACED - len(first)) :]))

    def pending(self, present: Iterable[str]) -> Replacement:
        """Return what holds while it is decided what replaces the weights: what was replaced is not forgotten."""
        return self.by("", "", present)


NOTHING = Replacement()


@dataclass
class _Tries:
    """Count, for one worker, the tries to find its weights at others, and those for which its disk had no room. `asked`: the
    processes that do not give them."""

    num_without: int = 0
    num_full: int = 0
    asked: set[WorkerKey] = field(default_factory=set)


class ReplacedWeights(SharedSettings[str, Replacement]):
    """Hold by model what replaced its weights; `refresh` exchanges it with Redis."""

    def __init__(self, url: str = "", mesh: str = "default", secret: MeshSecret | None = None) -> None:
        """As SharedSettings, sealed: workers open the folders that entries name."""
        super().__init__(url, mesh, "weights", secret)

    def _dump(self, key: str, value: Replacement) -> tuple[str, str]:
        return key, json.dumps([value.folder, value.weights_hash, value.replaced])

    def _load(self, field: bytes, value: bytes) -> tuple[str, Replacement] | None:
        folder, weights_hash, replaced = json.loads(value)
        if not isinstance(replaced, list) or len(replaced) > MAX_REPLACED:
            return None
        hashes = (weights_hash, *replaced)
        is_text = isinstance(folder, str) and len(folder) <= MAX_FOLDER_CHARS
        if not is_text or not all(isinstance(each, str) and len(each) <= MAX_HASH_CHARS for each in hashes):
            return None
        return field.decode(), Replacement(folder, weights_hash, tuple(replaced))


class WeightsKeeper:
    """Bring workers that come with replaced weights to what replaced them, from `start` to `stop`."""

    def __init__(self, fleet: FleetRegistry, replaced: ReplacedWeights) -> None:
        """Nothing is done before `start`."""
        self._fleet, self._replaced = fleet, replaced
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._given_up: dict[WorkerKey, str] = {}  # the weights that a worker cannot have, by their hash
        self._without_source: dict[WorkerKey, tuple[str, set[WorkerKey]]] = {}  # their hash, and which processes lack them
        self._keeper: asyncio.Task[None] | None = None
        self._changes: set[asyncio.Task[Any]] = set()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by model

    async def start(self) -> None:
        """Read what is known, for a moment, and look at every worker that comes from now on."""
        await self._replaced.read_first()
        self._fleet.on_arrival.append(self._look)
        self._keeper = asyncio.create_task(self._replaced.refresh_forever(self._keep), name="keep replaced weights")

    async def stop(self) -> None:
        """Stop; what was replaced stays in Redis."""
        if self._look in self._fleet.on_arrival:
            self._fleet.on_arrival.remove(self._look)
        tasks = [*self._tasks.values(), *self._changes, *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._replaced.close()

    def replacement(self, model: str) -> Replacement:
        """Return what is known of the model's weights."""
        return self._replaced.entries.get(model, NOTHING)

    def changing(self, model: str) -> asyncio.Lock:
        """Return what a change of the model's weights holds: two at the same time would each forget what the other replaced."""
        return self._locks[model]

    def lasting(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Return the task of a change that goes on, until `stop`, where the call that asked for it ends: so do the workers."""
        task = asyncio.create_task(change, name="replace weights")
        self._changes.add(task)
        task.add_done_callback(self._has_changed)
        return task

    def _has_changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("weights were not replaced: %s", error)

    async def put(self, model: str, replacement: Replacement) -> None:
        """Remember what replaced the weights of the model, from now on."""
        await self._replaced.put(model, replacement)
        self._keep()

    def _keep(self) -> None:
        alive = alive_workers(self._fleet)
        self._given_up = {key: given_up for key, given_up in self._given_up.items() if key in alive}
        self._without_source = {key: known for key, known in self._without_source.items() if key in alive}
        for worker in alive.values():
            self._look(worker)

    def _look(self, worker: Worker) -> None:
        """Begin to bring a worker that came with replaced weights to the present ones; it gets no requests until it has them. One
        whose weights have changed since it came is left alone: whoever changes them may be under way."""
        current = worker.current
        if current is None or current.former_weights[0]:
            return
        key, identity = (worker.address, current.info.epoch), current.info.identity
        wanted = self.replacement(identity.model)
        is_replaced = wanted.weights_hash and identity.weights_hash in wanted.replaced
        if not is_replaced or self._given_up.get(key) == wanted.weights_hash:
            return
        known_hash, asked = self._without_source.get(key, ("", set()))
        if known_hash == wanted.weights_hash and not self._sources(worker, wanted, asked):
            return
        worker.hold()
        if key in self._tasks:  # it was silent for a while, and is not held since
            return
        task = self._tasks[key] = asyncio.create_task(self._bring(worker, key, wanted), name=f"weights of {worker.address}")
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _bring(self, worker: Worker, key: WorkerKey, wanted: Replacement) -> None:
        assert worker.current is not None
        tries, lost = _Tries(), worker.current.lost
        try:
            while self._is_due(worker, key, wanted):
                wait_s = await unless(lost, self._update(worker, key, wanted, tries))
                if not wait_s:
                    return
                await asyncio.sleep(wait_s)
        finally:
            if worker.current is not None and worker.current.info.epoch == key[1]:
                worker.release()

    def _is_due(self, worker: Worker, key: WorkerKey, wanted: Replacement) -> bool:
        """Return whether it is the process that came, with the weights that it came with, and these are to be replaced still."""
        current = worker.current
        if current is None or current.info.epoch != key[1] or current.former_weights[0]:
            return False
        return self.replacement(current.info.identity.model) == wanted

    async def _update(self, worker: Worker, key: WorkerKey, wanted: Replacement, tries: _Tries) -> float:
        """Have the worker load the weights. Return after how many seconds to ask again; 0: it has them, or cannot have them."""
        if _is_asleep(worker):
            return ASLEEP_PERIOD_S
        what = wanted.folder or "what was sent"
        try:
            done = await self._load(worker, key, wanted, tries)
        except grpc.aio.AioRpcError as error:
            problem, is_full = error.details() or error.code().name, error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            tries.num_full += is_full
            if (error.code() in _CANNOT and not _is_asleep(worker)) or tries.num_full >= FULL_TRIES:
                self._give_up(worker, key, wanted, problem)
                return 0.0
            logger.warning("%s has come and is to load %s, as its model: %s", worker.address, what, problem)
            return AGAIN_AFTER_S
        if done is None:
            tries.num_without += 1
            if tries.num_without < SOURCE_TRIES:
                return SOURCE_PERIOD_S
            self._without_source[key] = wanted.weights_hash, tries.asked
            _keeps_its_own(worker, "they were sent, and no worker is here that has them; send them again")
            return 0.0
        found = done.identity.weights_hash
        worker.has_weights(found)
        whose = "the weights of its model" if found == wanted.weights_hash else "other weights than its model has, by now"
        logger.info("%s has come and has loaded %s: %s", worker.address, what, whose)
        return 0.0

    async def _load(
        self, worker: Worker, key: WorkerKey, wanted: Replacement, tries: _Tries
    ) -> worker_pb2.UpdateWeightsResponse | None:
        """Return what the worker says once it has the weights; None where they were sent, and no worker gives them. Raises
        AioRpcError of this worker."""
        if wanted.folder:
            request = worker_pb2.UpdateWeightsRequest(folder=wanted.folder)
            return await worker.control.UpdateWeights(request, timeout=CALL_TIMEOUT_S)
        try:
            request = worker_pb2.UpdateWeightsRequest(sent_hash=wanted.weights_hash)
            return await worker.control.UpdateWeights(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NOT_KEPT:
                raise
        for source in self._sources(worker, wanted):
            if (current := source.current) is None or not self._is_due(worker, key, wanted):
                continue
            tries.asked.add((source.address, current.info.epoch))
            passing = _Passing(source, current.lost, wanted.weights_hash)
            if (done := await passing.to(worker, lambda: self._is_due(worker, key, wanted))) is not None:
                return done
        return None

    def _sources(self, worker: Worker, wanted: Replacement, without: Collection[WorkerKey] = ()) -> list[Worker]:
        """Return the workers that compute with the weights, in any order, but for the processes `without`."""
        found = [
            other
            for other in self._fleet.workers.values()
            if other is not worker
            and (current := other.current) is not None
            and current.info.identity.weights_hash == wanted.weights_hash
            and (other.address, current.info.epoch) not in without
        ]
        random.shuffle(found)  # several routers, and workers that come, ask at the same time
        return found

    def _give_up(self, worker: Worker, key: WorkerKey, wanted: Replacement, problem: str) -> None:
        """Leave the worker with its own weights for good, apart from the others."""
        self._given_up[key] = wanted.weights_hash
        _keeps_its_own(worker, problem)


def _keeps_its_own(worker: Worker, problem: str) -> None:
    text = "%s has come with weights that were replaced and keeps them, apart from the others: %s"
    logger.warning(text, worker.address, problem)


def _is_asleep(worker: Worker) -> bool:
    current = worker.current
    return current is not None and current.load.serving_state == worker_pb2.SERVING_STATE_ASLEEP


class _Passing:
    """Pass the files that `source` keeps of its weights on to another worker. `lost` says that it is lost."""

    def __init__(self, source: Worker, lost: Signal, weights_hash: str) -> None:
        request = worker_pb2.ReadWeightsRequest(weights_hash=weights_hash)
        self._address, self._lost = source.address, lost
        self._reading = source.control.ReadWeights(request, timeout=PASS_TIMEOUT_S)
        self._problem = ""

    async def to(self, worker: Worker, is_wanted: Callable[[], bool]) -> worker_pb2.UpdateWeightsResponse | None:
        """Return what `worker` says once it has them; None where the source does not give them, or not all of them, or they are
        not wanted any more. Raises AioRpcError of `worker`."""
        try:
            return await worker.control.SendWeights(self._pieces(is_wanted), timeout=PASS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            if not self._problem:
                raise
            logger.warning("%s gives %s no weights: %s", self._address, worker.address, self._problem)
            return None
        finally:
            self._reading.cancel()

    async def _pieces(self, is_wanted: Callable[[], bool]) -> AsyncIterator[worker_pb2.SendWeightsRequest]:
        """Yield them to the end, or to the first problem: what has come until then is refused, as its end is missing."""
        try:
            while is_wanted() and (piece := await unless(self._lost, self._next())) is not None:
                yield piece
                if piece.sha256:
                    return
            self._problem = "it is lost" if self._lost.is_set() else "they are not wanted any more"
        except grpc.aio.AioRpcError as error:
            self._problem = error.details() or error.code().name
        except TimeoutError:
            self._problem = f"nothing came for {PIECE_TIMEOUT_S:.0f} s"

    async def _next(self) -> worker_pb2.SendWeightsRequest | None:
        """Return the next piece; None at the end of the stream."""
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            message = await self._reading.read()
        return message.piece if isinstance(message, worker_pb2.ReadWeightsResponse) else None
