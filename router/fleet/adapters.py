"""LoRA adapters in a fleet: which worker has which, and the router's part in loading them everywhere.

    LoadAdapter(name, folder) ─► one worker loads it and says what is in it ─► all others load the same ─► remembered as wanted
    every second, and when a worker comes: a worker that lacks what is wanted loads it, one that has what is unwanted unloads it

So an adapter is on workers that were restarted or started later, whichever router was told. Loading twice changes nothing, so
routers need not agree on which of them does it. Adapters that workers were started with (--lora) need no router.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import grpc.aio

from pdmesh.adapter_id import AdapterId, check_adapter_name
from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, MeshError, NotFound, Unavailable, error_from_rpc
from pdmesh.runtime.registry.shared_settings import SharedSettings
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.routing.worker_snapshot import WorkerKey

# Which adapters a mesh is to have, kept in Redis: so routers, workers and their restarts agree.
#
# A name is either wanted from a folder or unwanted; what was never said to a router (adapters that workers were started with) is
# neither. Without Redis a router remembers by itself, as long as it runs.


class AdapterKey(NamedTuple):
    """Name an adapter of a model."""

    model: str
    name: str


@dataclass(frozen=True)
class Wanted:
    """Say where the workers find an adapter and what is in it. Empty: they are not to have it."""

    folder: str
    digest: str

    @property
    def is_wanted(self) -> bool:
        return bool(self.folder)


UNWANTED = Wanted("", "")


class WantedAdapters(SharedSettings[AdapterKey, Wanted]):
    """Hold what is wanted; `refresh` exchanges it with Redis."""

    def __init__(self, url: str, mesh: str, secret: MeshSecret | None = None) -> None:
        """Without a `url` nothing is exchanged. With `secret` entries are sealed and others ignored: workers open the folders
        that they name. Raises ConfigError for a malformed URL."""
        super().__init__(url, mesh, "adapters", secret)

    def _dump(self, key: AdapterKey, value: Wanted) -> tuple[str, str]:
        return json.dumps(key), json.dumps([value.folder, value.digest])

    def _load(self, field: bytes, value: bytes) -> tuple[AdapterKey, Wanted] | None:
        model, name = json.loads(field)
        folder, digest = json.loads(value)
        texts = (model, name, folder, digest)
        return (AdapterKey(model, name), Wanted(folder, digest)) if all(isinstance(text, str) for text in texts) else None


# The fleet.

PERIOD_S = 1.0
CALL_TIMEOUT_S = 120.0
AGAIN_AFTER_S = 10.0
"""A worker that could not load an adapter is asked again after this time."""

logger = logging.getLogger(__name__)
Work = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class _Failure:
    """Say why a worker has not done what it was asked, and when it was."""

    message: str
    at: float


class FleetAdapters:
    """Know and change the adapters of all workers, from `start` to `stop`."""

    def __init__(self, fleet: FleetRegistry, wanted: WantedAdapters, *, may_change: bool) -> None:
        """`may_change`: clients may load and unload."""
        self._fleet = fleet
        self._wanted = wanted
        self._may_change = may_change
        self._failures: dict[tuple[WorkerKey, AdapterKey], _Failure] = {}
        self._busy: set[WorkerKey] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._remembered: dict[str, tuple[str, AdapterId]] = {}

    def start(self) -> None:
        """Begin to keep the workers as they are wanted."""
        self._keeper = asyncio.create_task(self._keep_forever(), name="keep adapters")

    async def stop(self) -> None:
        """Stop; what is wanted stays in Redis."""
        tasks = [*self._tasks, *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._wanted.close()

    def find(self, name: str, models: Iterable[str]) -> tuple[str, AdapterId] | None:
        """Return model and adapter for a name that a request asks for; None: no worker of these models has it, or had it until it
        was lost, and none is to have it. Where workers differ, it is what most of them have."""
        votes: Counter[tuple[str, AdapterId]] = Counter()
        for worker in self._fleet.workers.values():
            known = worker.last
            if known is None or known.info.identity.model not in models:
                continue
            votes.update((known.info.identity.model, each) for each in _adapters_of(worker) if each.name == name)
        for key, wanted in self._wanted.entries.items():
            if key.name == name and key.model in models and wanted.is_wanted:
                votes[key.model, AdapterId(name, wanted.digest)] += 1
            elif key.name == name:
                votes = Counter({each: count for each, count in votes.items() if each[0] != key.model})
        return max(votes, key=lambda each: (votes[each], each)) if votes else self._of_no_worker(name, models)

    def _of_no_worker(self, name: str, models: Iterable[str]) -> tuple[str, AdapterId] | None:
        """Return an adapter that the last workers of a model had which has none now: those that come will have it."""
        known = self._remembered.get(name)
        if known is None or known[0] not in models or self._fleet.serves(known[0]):
            return None
        wanted = self._wanted.entries.get(AdapterKey(known[0], name))
        return known if wanted is None or wanted.is_wanted else None

    def names(self, models: Iterable[str]) -> list[tuple[str, str]]:
        """Return (model, adapter's name) of all that requests may ask for."""
        served = frozenset(models)
        known = {
            (worker.last.info.identity.model, each.name)
            for worker in self._fleet.workers.values()
            if worker.last is not None
            for each in worker.last.adapters
        }
        for (model, name), wanted in self._wanted.entries.items():
            known = known | {(model, name)} if wanted.is_wanted else known - {(model, name)}
        known |= {(model, name) for name, (model, _) in self._remembered.items() if self._of_no_worker(name, served) is not None}
        return sorted(each for each in known if each[0] in served)

    async def load(self, model: str, name: str, folder: str) -> mesh_pb2.MeshAdapter:
        """Load an adapter on all workers of the model. Raises MeshError when none could."""
        self._check_change(name)
        if not folder:
            raise InvalidArgument("folder", "empty; give the folder that PEFT saved, as the workers see it")
        first, *others = self._with_places(model)
        key, errors = AdapterKey(model, name), dict[WorkerKey, MeshError]()
        digest = ""
        for worker in (first, *others):
            error = await self._load(worker, key, Wanted(folder, digest))
            if error is None:
                digest = next((each.digest for each in _adapters_of(worker) if each.name == name), digest)
                break
            errors[_key_of(worker)] = error
        else:
            raise next(iter(errors.values()))
        wanted = Wanted(folder, digest)
        await self._wanted.put(key, wanted)
        left = [worker for worker in (first, *others) if _key_of(worker) not in errors]
        await asyncio.gather(*(self._load(worker, key, wanted) for worker in left))
        return self._described(key)

    async def unload(self, model: str, name: str) -> mesh_pb2.MeshAdapter:
        """Unload an adapter on all workers of the model. Raises NotFound where no worker has it."""
        self._check_change(name)
        key = AdapterKey(model, name)
        holders = [worker for worker in self._workers(model) if any(each.name == name for each in _adapters_of(worker))]
        if not holders and not self._wanted.entries.get(key, UNWANTED).is_wanted:
            raise NotFound(f"name: no worker of {model!r} has an adapter {name[:80]!r}", field="name")
        await self._wanted.put(key, UNWANTED)
        running = dict(zip(map(_key_of, holders), await asyncio.gather(*(self._unload(w, key) for w in holders)), strict=True))
        return self._described(key, running)

    def listed(self, models: Iterable[str]) -> mesh_pb2.ListMeshAdaptersResponse:
        """Return all adapters of these models."""
        keys = [AdapterKey(*each) for each in self.names(models)]
        return mesh_pb2.ListMeshAdaptersResponse(adapters=[self._described(key) for key in keys])

    def _described(self, key: AdapterKey, running: dict[WorkerKey, int] | None = None) -> mesh_pb2.MeshAdapter:
        found, wanted = self.find(key.name, [key.model]), self._wanted.entries.get(key, UNWANTED)
        digest = found[1].digest if found else ""
        workers = [
            mesh_pb2.AdapterOnWorker(
                worker_id=worker.last.info.worker_id if worker.last else worker.address,
                loaded=any(each.name == key.name for each in _adapters_of(worker)),
                error=failure.message if (failure := self._failures.get((_key_of(worker), key))) else "",
                num_running=(running or {}).get(_key_of(worker), 0),
            )
            for worker in self._workers(key.model)
        ]
        return mesh_pb2.MeshAdapter(name=key.name, model=key.model, digest=digest, folder=wanted.folder, workers=workers)

    def _check_change(self, name: str) -> None:
        if not self._may_change:
            raise FailedPrecondition(
                "name",
                "this router lets no client load or unload adapters; start it with --adapter-changes on, or workers with --lora",
            )
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise InvalidArgument("name", str(error)) from error

    def _workers(self, model: str) -> list[Worker]:
        """Return the model's live workers that have places for adapters."""
        return [
            worker
            for worker in self._fleet.workers.values()
            if (known := worker.current) and known.info.identity.model == model and known.info.max_adapters
        ]

    def _with_places(self, model: str) -> list[Worker]:
        workers = self._workers(model)
        if not workers and any(w.current and w.current.info.identity.model == model for w in self._fleet.workers.values()):
            raise FailedPrecondition("name", f"no worker of {model!r} has places for adapters; start workers with --max-loras 8")
        if not workers:
            raise Unavailable(f"no worker of {model!r} is reachable")
        return workers

    async def _load(self, worker: Worker, key: AdapterKey, wanted: Wanted) -> MeshError | None:
        """Have a worker load an adapter; return why it could not."""
        request = worker_pb2.LoadAdapterRequest(model=key.model, name=key.name, folder=wanted.folder, digest=wanted.digest)
        place = (_key_of(worker), key)
        try:
            worker.told_adapter(await worker.control.LoadAdapter(request, timeout=CALL_TIMEOUT_S))
        except grpc.aio.AioRpcError as failed:
            error = error_from_rpc(failed)
            self._failures[place] = _Failure(error.message, time.monotonic())
            logger.warning("adapter %s of %s on %s: %s", key.name, key.model, worker.address, error.message)
            return error
        self._failures.pop(place, None)
        return None

    async def _unload(self, worker: Worker, key: AdapterKey) -> int:
        """Have a worker unload an adapter; return how many requests still run with it."""
        place = (_key_of(worker), key)
        try:
            request = worker_pb2.UnloadAdapterRequest(model=key.model, name=key.name)
            answer = await worker.control.UnloadAdapter(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as failed:
            error = error_from_rpc(failed)
            if not isinstance(error, NotFound):
                self._failures[place] = _Failure(error.message, time.monotonic())
            return 0
        self._failures.pop(place, None)
        worker.forget_adapter(key.name)
        return answer.num_running

    async def _keep_forever(self) -> None:
        while True:
            try:
                await self._wanted.refresh()
                self._keep()
            except Exception:  # a bug with one adapter must not stop the keeper
                logger.exception("keeping the workers' adapters failed")
            change = self._fleet.arrivals.next
            try:
                async with asyncio.timeout(PERIOD_S):
                    await change.wait()
            except TimeoutError:
                continue

    def _remember(self) -> None:
        """Remember what the workers of each model have, for the time when it has none."""
        here = [
            (worker.last.info.identity.model, worker) for worker in self._fleet.workers.values() if worker.last and worker.current
        ]
        served = {model for model, _ in here}
        kept = {name: known for name, known in self._remembered.items() if known[0] not in served}
        self._remembered = kept | {each.name: (model, each) for model, worker in here for each in _adapters_of(worker)}

    def _keep(self) -> None:
        """Begin to bring each worker that differs from what is wanted to it, one worker's changes after the other."""
        self._remember()
        alive = {_key_of(worker) for worker in self._fleet.workers.values() if worker.current}
        self._failures = {place: failure for place, failure in self._failures.items() if place[0] in alive}
        for worker in self._fleet.workers.values():
            works = list(self._due(worker)) if worker.current and _key_of(worker) not in self._busy else []
            if works:
                task = asyncio.create_task(self._bring(worker, works), name=f"adapters of {worker.address}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _due(self, worker: Worker) -> Iterator[Work]:
        current = worker.current
        if current is None or not current.info.max_adapters:
            return
        model, held = current.info.identity.model, {each.name: each for each in _adapters_of(worker)}
        for key, wanted in self._wanted.entries.items():
            failure = self._failures.get((_key_of(worker), key))
            if key.model != model or (failure and time.monotonic() - failure.at < AGAIN_AFTER_S):
                continue
            if key.name in held and held[key.name].digest != wanted.digest:
                yield partial(self._unload, worker, key)
            if wanted.is_wanted and held.get(key.name) != AdapterId(key.name, wanted.digest):
                yield partial(self._load, worker, key, wanted)

    async def _bring(self, worker: Worker, works: list[Work]) -> None:
        key = _key_of(worker)
        self._busy.add(key)
        try:
            for work in works:
                await work()
        finally:
            self._busy.discard(key)


def _adapters_of(worker: Worker) -> frozenset[AdapterId]:
    """Return what a worker last said that it has, lately lost ones included."""
    return worker.last.adapters if worker.last is not None else frozenset()


def _key_of(worker: Worker) -> WorkerKey:
    return (worker.address, worker.last.info.epoch if worker.last else 0)
