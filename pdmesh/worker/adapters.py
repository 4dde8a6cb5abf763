"""The LoRA adapters of a worker, seen from the event loop: what it offers, and loading and unloading while it serves.

Files are read and checked in a thread; the engine's thread puts the weights into place between two steps. What is offered changes
at once: routers see it with the next report, which a change sends early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pdmesh.adapter_id import AdapterId, check_adapter_name
from pdmesh.engine.errors import AdapterRefused
from pdmesh.engine.lora.folder import digest_of
from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, NotFound
from pdmesh.v1 import common_pb2, worker_pb2
from pdmesh.worker.engines.base import EngineAdapters, Loaded


class WorkerAdapters:
    """Offer the adapters of one engine. Everything here is called on the event loop."""

    def __init__(self, adapters: EngineAdapters, model: str, on_change: Callable[[], None]) -> None:
        """`model`: the name that clients ask for. `on_change` is called when what is offered has changed."""
        self._adapters = adapters
        self._model = model
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self.max_adapters = adapters.max_adapters
        self._offered = _offered(adapters.at_start)

    def infos(self) -> list[common_pb2.AdapterInfo]:
        """Return the adapters that requests may ask for, by name."""
        return list(self._offered.values())

    def find(self, name: str, digest: str) -> AdapterId:
        """Return the adapter that a request names. Raises FailedPrecondition where it is not here, or has other weights."""
        found = self._offered.get(name)
        if found is None:
            raise FailedPrecondition("request.adapter", f"adapter {name[:80]!r} is not loaded on this worker")
        if digest and digest != found.digest:
            raise FailedPrecondition("request.adapter_digest", f"adapter {name!r} has other weights on this worker")
        return AdapterId(found.name, found.digest)

    async def load(self, request: worker_pb2.LoadAdapterRequest) -> common_pb2.AdapterInfo:
        """Load an adapter. Raises InvalidArgument or FailedPrecondition naming the field."""
        self._check(request)
        folder = Path(request.folder)
        async with self._lock:
            known = self._offered.get(request.name)
            try:
                digest = await asyncio.to_thread(digest_of, folder)
                if request.digest and request.digest != digest:
                    raise FailedPrecondition("digest", f"{folder} has other files than the adapter that was asked for")
                if known is not None and known.digest == digest:
                    return known
                self._offered = _offered(await self._adapters.load(request.name, folder))
            except AdapterRefused as error:
                raise FailedPrecondition("name", str(error)) from error
            except (ValueError, OSError) as error:
                raise InvalidArgument("folder", f"adapter {request.name!r}: {error}") from error
            self._on_change()
            return self._offered[request.name]

    async def unload(self, request: worker_pb2.UnloadAdapterRequest) -> worker_pb2.UnloadAdapterResponse:
        """Offer the adapter no longer; return how many requests still run with it. Raises NotFound."""
        self._check_model(request.model)
        async with self._lock:
            if self._offered.pop(request.name, None) is None:
                raise NotFound(f"adapter {request.name[:80]!r} is not loaded on this worker", field="name")
            self._on_change()  # before the engine refuses any: routers should not send more
            num_running = await self._adapters.unload(request.name)
        return worker_pb2.UnloadAdapterResponse(num_running=num_running)

    def listed(self) -> worker_pb2.AdapterList:
        """Return what is offered."""
        return worker_pb2.AdapterList(adapters=self.infos(), max_adapters=self.max_adapters)

    def _check(self, request: worker_pb2.LoadAdapterRequest) -> None:
        self._check_model(request.model)
        try:
            check_adapter_name(request.name)
        except ValueError as error:
            raise InvalidArgument("name", str(error)) from error
        if request.name == self._model:
            raise InvalidArgument("name", f"{request.name!r} is the model's own name; give the adapter another one")
        if not request.folder:
            raise InvalidArgument("folder", "empty; give the folder that PEFT saved")
        if not self.max_adapters:
            raise FailedPrecondition("name", "this worker has no places for adapters; start it with --max-loras 8")

    def _check_model(self, model: str) -> None:
        if model and model != self._model:
            raise FailedPrecondition("model", f"this worker serves {self._model!r}, not {model[:80]!r}")


def _offered(loaded: Loaded) -> dict[str, common_pb2.AdapterInfo]:
    return {each.name: common_pb2.AdapterInfo(name=each.name, digest=each.digest, rank=rank) for each, rank in loaded}
