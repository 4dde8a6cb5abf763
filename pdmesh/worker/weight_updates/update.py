"""Other weights for a worker that runs: they are loaded beside the present ones, then taken between two steps.

    stream of files ──► folder ──► loaded, off the engine's thread ──► taken by the engine ──► identity changed ──► routers told
                           └── kept meanwhile, for a worker that comes later

From the identity follow the roots of block hashes, and which workers may hand KV to each other. It is changed in place, in the
moment in which the engine has changed: all parts of a worker hold the same message. What was made of the old one and is not
looked at again is refused before (`depending`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pdmesh.client.weights import files_of, messages_of
from pdmesh.engine.errors import WeightsRefused
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from pdmesh.runtime.files import cache_root_of
from pdmesh.v1 import common_pb2, worker_pb2
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.base import WorkerEngine
from pdmesh.worker.serving import WorkerServing
from pdmesh.worker.token_request import ServedModel
from pdmesh.worker.weight_updates.received import KeptWeights, ReceivedWeights

MAX_FOLDER_CHARS = 4096
T = TypeVar("T")

logger = logging.getLogger(__name__)


class _OtherWeights(Exception):
    """Raised when files are other weights than those that were asked for."""


@dataclass(frozen=True)
class _Asked:
    """Hold what is to be loaded: `order` counts the changes in the order in which they began; `expected`: their hash, empty: any;
    `keep`, by their hash, keeps the files where they were sent."""

    folder: str
    order: int
    expected: str = ""
    keep: Callable[[str], KeptWeights | None] = lambda _: None


async def _shielded(change: Coroutine[object, object, T]) -> T:
    """Await it in a task of its own: a caller that leaves ends neither a load, beside which the next would begin, nor the
    change."""
    return await asyncio.shield(asyncio.create_task(change, name="weights"))


class WorkerWeights:
    """Replace the weights of one worker, one at a time."""

    def __init__(
        self,
        engine: WorkerEngine,
        served: ServedModel,
        changed: Callable[[], None],
        depending: tuple[str, ...],
        serving: WorkerServing,
    ) -> None:
        """`served` has the identity, the message that all parts of the worker hold; `changed` is called when it has changed;
        `depending`: what was made of it for good, in words. A change of weights and one of `serving` exclude each other."""
        self._engine, self._served, self._changed, self._depending = engine, served, changed, depending
        self._identity = served.identity
        self._model = engine.facts.model
        self._serving = serving
        self._kept: KeptWeights | None = None  # the files of the present weights, where these were sent
        self._receiving: set[str] = set()  # hashes of those whose files are coming
        self._num_begun = self._latest_taken = 0
        self._is_closed = False

    async def update(self, request: worker_pb2.UpdateWeightsRequest) -> worker_pb2.UpdateWeightsResponse:
        """Serve UpdateWeights. Raises MeshError."""
        self._check_may()
        folder, order = request.folder, self._next_order()
        if request.sent_hash:
            if folder:
                raise InvalidArgument("sent_hash", "is given beside a folder; give one of them")
            return await _shielded(self._use_kept(request.sent_hash, order))
        if not folder or len(folder) > MAX_FOLDER_CHARS:
            raise InvalidArgument("folder", f"has {len(folder)} characters; give a folder or a .gguf file as this worker sees it")
        if not await asyncio.to_thread(os.path.exists, folder):  # False also for a text that can be no path
            raise InvalidArgument("folder", f"{folder[:200]!r} does not exist on this worker's machine")
        return await _shielded(self._update(_Asked(folder, order)))

    async def receive(self, messages: AsyncIterator[worker_pb2.SendWeightsRequest]) -> worker_pb2.UpdateWeightsResponse:
        """Serve SendWeights. What was received is kept while this worker computes with it. Of the same weights, where they are
        named, only the first to come are taken: each process of each router may pass them on. Raises MeshError."""
        self._check_may()
        order, first = self._next_order(), await anext(messages, worker_pb2.SendWeightsRequest())
        named = first.weights_hash
        if named in self._receiving:
            raise Unavailable("these weights are coming already, from elsewhere; ask again later")
        self._receiving.update({named} - {""})
        try:
            return await self._receive(first, messages, order)
        finally:
            self._receiving.discard(named)

    async def _receive(
        self, first: worker_pb2.SendWeightsRequest, messages: AsyncIterator[worker_pb2.SendWeightsRequest], order: int
    ) -> worker_pb2.UpdateWeightsResponse:
        received = await ReceivedWeights.begin(Path(self._model), first)
        try:
            async for message in messages:
                await received.take(message)
            await received.end()
        except BaseException:
            await asyncio.to_thread(received.remove)
            raise
        return await _shielded(self._use(received, first.weights_hash, order))

    async def _use(self, received: ReceivedWeights, expected: str, order: int) -> worker_pb2.UpdateWeightsResponse:
        try:
            return await self._update(_Asked(str(received.folder), order, expected, received.keep))
        except _OtherWeights as error:
            raise FailedPrecondition("weights_hash", f"the files that came are other weights: {error}") from error
        finally:
            await asyncio.to_thread(received.remove)

    async def _use_kept(self, sent_hash: str, order: int) -> worker_pb2.UpdateWeightsResponse:
        kept = await asyncio.to_thread(KeptWeights.find, sent_hash)
        if kept is None:
            raise NotFound(f"this machine keeps no files of the weights {sent_hash[:80]!r}; send them", field="sent_hash")
        try:
            return await self._update(_Asked(str(kept.folder), order, sent_hash, KeptWeights.find))
        except _OtherWeights as error:
            await asyncio.to_thread(kept.release)
            raise NotFound(f"the files that this machine keeps are other weights: {error}", field="sent_hash") from error
        finally:
            kept.leave()  # they stay for another try where this one failed

    async def read(self, weights_hash: str) -> AsyncGenerator[worker_pb2.ReadWeightsResponse, None]:
        """Serve ReadWeights. Raises NotFound."""
        present, kept = self._kept, None
        if present is not None and present.weights_hash == weights_hash:
            kept = KeptWeights.hold(present.folder)  # of its own: these weights may be replaced meanwhile
        if kept is None:
            raise NotFound(f"this worker keeps no files of the weights {weights_hash[:80]!r}", field="weights_hash")
        try:
            pieces, first = messages_of(*files_of(kept.folder), ""), weights_hash
            while (piece := await asyncio.to_thread(lambda: next(pieces, None))) is not None:
                piece.weights_hash, first = first, ""
                yield worker_pb2.ReadWeightsResponse(piece=piece)
        finally:
            await asyncio.to_thread(kept.release)

    async def close(self) -> None:
        """Give up the files that are kept, now or at the end of a change that runs; idempotent."""
        self._is_closed = True
        await self._hold_instead(None)

    async def _hold_instead(self, kept: KeptWeights | None) -> None:
        former, self._kept = self._kept, kept
        if former is not None:
            await asyncio.to_thread(former.release)

    def _next_order(self) -> int:
        """Return the number of a change that begins: one that has begun before the latest one that was taken is too late."""
        self._num_begun += 1
        return self._num_begun

    def _check_may(self) -> None:
        """Raise FailedPrecondition or Unavailable while this worker takes no other weights."""
        if self._depending:
            raise FailedPrecondition("folder", f"this worker cannot take other weights while it has {', '.join(self._depending)}")
        if self._serving.is_finishing:
            raise Unavailable("this worker waits for requests to end, to pause or to sleep; try again", retry_delay_s=1.0)
        if self._serving.is_asleep:
            remedy = "wake it, or have it paused, which is awake as well (pdmesh serving paused)"
            raise FailedPrecondition("folder", f"this worker is asleep; {remedy}")

    async def _update(self, asked: _Asked) -> worker_pb2.UpdateWeightsResponse:
        """Load the weights and compute with them. Raises MeshError, and _OtherWeights."""
        folder = asked.folder
        async with self._serving.one_at_a_time:
            began = time.monotonic()
            self._check_may()  # again: it may have gone to sleep meanwhile
            try:
                prepared = await self._engine.load_weights(folder)
            except WeightsRefused as error:
                raise FailedPrecondition("folder", str(error)) from error
            except (ValueError, OSError, MemoryError) as error:
                raise InvalidArgument("folder", str(error)[:500]) from error
            if asked.expected not in ("", prepared.weights_hash):
                raise _OtherWeights(f"{prepared.weights_hash[:80]!r} instead of {asked.expected[:80]!r}")
            is_new = prepared.weights_hash != self._identity.weights_hash
            if is_new and asked.order < self._latest_taken:
                raise Aborted("weights that were asked for later have been taken meanwhile")
            try:
                pause_s = await self._engine.take_weights(prepared) if is_new else 0.0
            except WeightsRefused as error:
                raise FailedPrecondition("folder", str(error)) from error
            self._identity.weights_hash, self._latest_taken = prepared.weights_hash, max(asked.order, self._latest_taken)
            if is_new:
                self._changed()
                text = "weights of %s taken %.2f s after the call, of which no step ran for %.3f s"
                logger.info(text, folder, time.monotonic() - began, pause_s)
            await self._hold_instead(await asyncio.to_thread(asked.keep, prepared.weights_hash))
            if self._is_closed:
                await self._hold_instead(None)
            return worker_pb2.UpdateWeightsResponse(identity=self._identity, is_new=is_new, pause_s=pause_s)

    def holds(self, weights_hash: str) -> bool:
        """Return whether requests that began with these weights may go on with them here."""
        return self._engine.holds_weights(weights_hash)

    def request_for(self, weights_hash: str, wire: common_pb2.TokenRequest, request: EngineRequest) -> EngineRequest:
        """Return the request as one of these weights: its blocks are theirs."""
        identity = common_pb2.Identity()
        identity.CopyFrom(self._identity)
        identity.weights_hash = weights_hash
        root = cache_root_of(identity, self._served.layout.kv_dtype, tenant=wire.tenant, cache_salt=wire.cache_salt)
        return replace(request, weights_hash=weights_hash, cache_root=root)


def made_of_identity(config: WorkerConfig) -> tuple[str, ...]:
    """Return what a worker makes of its identity at its start and keeps, in words."""
    tiers, events = config.tiers, config.kv_event_settings
    found = {"KV tiers": bool(tiers.kv_host_gb or tiers.kv_disk or tiers.kv_store), "KV events": events.is_wanted}
    return tuple(what for what, is_so in found.items() if is_so)
