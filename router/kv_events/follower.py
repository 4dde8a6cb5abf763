"""The follower of KV events: it reads WatchBlocks of every worker while there are subscribers, and tells each what the mesh as a
whole gains and loses.

    worker ── list, changes ──► MeshBlocks ── changes ──► backlog of each subscriber

A subscriber begins with all blocks, and one that falls behind begins again. A worker whose stream breaks keeps its blocks until
it is lost, or lists them again.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from pdmesh.adapter_id import MAX_NAME_CHARS
from pdmesh.runtime.backlog import Backlog
from pdmesh.runtime.errors import ResourceExhausted, Unimplemented
from pdmesh.runtime.files import cache_root_of
from pdmesh.text.block_hash import HASH_BYTES
from pdmesh.v1 import worker_pb2
from router.fleet.following import CallEnd, Gap, InvalidMessage, alive_workers, call_again_while, look_forever
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.kv_events.mesh_blocks import MeshBlock, MeshBlocks, MeshChanges
from router.routing.worker_snapshot import WorkerKey
from router.tokenization.prepared_request import scoped_salt

SETTLE_S = 5.0  # what a subscriber waits at most for the lists of all workers
MAX_READERS = 16
MAX_WAITING_BLOCKS = 1 << 16
FIRST_GAP_S, MAX_GAP_S = 0.5, 30.0
_REFUSALS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeshUpdate:
    """Tell a subscriber what is new: all blocks (`is_list`), or changes."""

    is_list: bool
    changes: MeshChanges


@dataclass(eq=False)
class Followed:
    """Hold one incarnation of a worker. `answered`: it has listed its blocks, or refused to. `gap`: how long to wait once its
    stream has broken; it doubles until the worker lists its blocks again."""

    worker: Worker
    info: worker_pb2.WorkerInfo
    answered: bool = False
    refusal: str = ""
    task: asyncio.Task[None] | None = None
    gap: Gap = field(default_factory=lambda: Gap(FIRST_GAP_S, MAX_GAP_S))
    listing: list[MeshBlock] = field(default_factory=list)

    @property
    def key(self) -> WorkerKey:
        return (self.info.address, self.info.epoch)


class BlockFollower:
    """Follow the workers of one model, on one event loop, while somebody reads."""

    def __init__(self, fleet: FleetRegistry, model: str, max_pairs: int) -> None:
        """`max_pairs`: pairs of block and worker that are held at most."""
        self._fleet = fleet
        self._model = model
        self._max_pairs = max_pairs
        self._readers: set[Backlog[MeshChanges]] = set()
        self._followed: dict[WorkerKey, Followed] = {}
        self._blocks = MeshBlocks()
        self._looking: asyncio.Task[None] | None = None
        self._answers = asyncio.Event()
        self._is_full = False

    def is_plain(self, root: bytes, tenant: str) -> bool:
        """Return whether a tenant's requests without a salt share the blocks of this root."""
        salt = scoped_salt(tenant, "")
        infos = (each.info for each in self._followed.values())
        return any(root == cache_root_of(each.identity, each.layout.kv_dtype, tenant=tenant, cache_salt=salt) for each in infos)

    async def read(self) -> AsyncGenerator[MeshUpdate, None]:
        """Yield all blocks, then changes, until `stop`. Raises Unimplemented: no worker has KV events; ResourceExhausted."""
        async with self._reading() as backlog:
            await self._settle()
            while not backlog.closed:
                if backlog.has_dropped:
                    backlog.restart()
                    yield MeshUpdate(True, MeshChanges((), self._blocks.all()))
                changes = await backlog.get()
                if changes is not None:
                    yield MeshUpdate(False, changes)
            if self._is_full:
                raise ResourceExhausted(f"the workers hold more than {self._max_pairs} blocks; raise --prefix-index-blocks")

    async def stop(self) -> None:
        """End all reading; idempotent."""
        for reader in self._readers:
            reader.close()
        await self._stop_following()

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[Backlog[MeshChanges]]:
        if len(self._readers) >= MAX_READERS:
            raise ResourceExhausted(f"{MAX_READERS} subscribers to KV events are the most; end one", retry_delay_s=10.0)
        backlog = Backlog[MeshChanges](MAX_WAITING_BLOCKS)
        self._readers.add(backlog)
        if self._looking is None:
            self._is_full = False
            looking = look_forever(self._fleet, self._look, logger, "workers with KV events")
            self._looking = asyncio.create_task(looking, name="workers of KV events")
            self._look()
        try:
            yield backlog
        finally:
            self._readers.discard(backlog)
            if not self._readers:
                await self._stop_following()

    async def _stop_following(self) -> None:
        looking, self._looking = self._looking, None
        followed, self._followed, self._blocks = self._followed, {}, MeshBlocks()
        tasks = [task for task in (looking, *(each.task for each in followed.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self) -> None:
        """Wait until all workers have listed their blocks, or refused. Raises Unimplemented if all refused."""
        try:
            async with asyncio.timeout(SETTLE_S):
                while not all(each.answered for each in self._followed.values()):
                    self._answers.clear()
                    await self._answers.wait()
        except TimeoutError:
            logger.info("KV events begin without the blocks of workers that have not listed them yet")
        refusals = [each.refusal for each in self._followed.values()]
        if refusals and all(refusals):
            raise Unimplemented(f"SubscribeKvEvents: no worker has KV events; start workers with --kv-events ({refusals[0]})")

    def _look(self) -> None:
        """Start to follow new workers, and forget those that are lost."""
        alive: dict[WorkerKey, Followed] = {}
        for key, worker in alive_workers(self._fleet).items():
            if worker.current is not None and worker.current.info.identity.model == self._model:
                alive[key] = Followed(worker, worker.current.info)
        for key in self._followed.keys() - alive.keys():
            lost = self._followed.pop(key)
            if lost.task is not None:
                lost.task.cancel()
            self._spread(self._blocks.forget(key))
            self._answers.set()
        for key in alive.keys() - self._followed.keys():
            followed = self._followed[key] = alive[key]
            followed.task = asyncio.create_task(self._follow(followed), name=f"KV events of {followed.info.address}")

    async def _follow(self, followed: Followed) -> None:
        await call_again_while(
            lambda: not followed.refusal,
            lambda: self._follow_once(followed),
            lambda end: self._note_end(followed, end),
            followed.gap,
        )

    def _note_end(self, followed: Followed, end: CallEnd) -> None:
        """Log why a stream has ended, and whether the worker will never have another."""
        if end.code in _REFUSALS:
            followed.answered, followed.refusal = True, end.problem or "refused"
            self._answers.set()
        if end.bug is not None:
            logger.error("following the KV events of %s failed", followed.info.address, exc_info=end.bug)
        logger.info("KV events of %s are not known: %s", followed.info.worker_id, end.problem or "its stream ended")

    async def _follow_once(self, followed: Followed) -> None:
        """Apply one stream. Raises InvalidMessage, AioRpcError; CancelledError also when only the call is cancelled."""
        is_listed = False
        followed.listing = []
        call = followed.worker.control.WatchBlocks(worker_pb2.WatchBlocksRequest())
        try:
            async for message in call:
                if not is_listed and not message.is_list:
                    raise InvalidMessage("is_list: false, before the list was complete")
                self._take(followed, message)
                is_listed = is_listed or message.is_last
        finally:
            call.cancel()  # drops further messages

    def _take(self, followed: Followed, message: worker_pb2.BlockEvents) -> None:
        info, key = followed.info, followed.key
        if message.epoch != info.epoch:
            raise InvalidMessage(f"epoch {message.epoch:016x} is not the worker's {info.epoch:016x}")
        stored = list(blocks_of(message, info.layout.block_size))
        if not message.is_list:
            self._spread(self._blocks.change(key, message.removed, stored))
        else:
            followed.listing += stored
        if max(len(followed.listing), self._blocks.num_held(key)) > info.num_blocks:
            raise InvalidMessage(f"stored blocks are more than the worker's num_blocks, {info.num_blocks}")
        if message.is_last:
            listing, followed.listing, followed.answered = followed.listing, [], True
            followed.gap.reset(to_first=True)
            self._spread(self._blocks.replace(key, listing))
            self._answers.set()

    def _spread(self, changes: MeshChanges) -> None:
        if self._blocks.num_pairs > self._max_pairs:
            self._is_full = True
            for reader in self._readers:
                reader.close()
        elif changes.removed or changes.stored:
            for reader in self._readers:
                reader.put(changes, len(changes.removed) + len(changes.stored))


def blocks_of(message: worker_pb2.BlockEvents, block_size: int) -> Iterator[MeshBlock]:
    """Yield the blocks that a message stores. Raises InvalidMessage."""
    for index, chain in enumerate(message.stored):
        where = f"stored[{index}]"
        if not chain.blocks or len(chain.token_ids) != block_size * len(chain.blocks):
            raise InvalidMessage(f"{where}.token_ids: {len(chain.token_ids)} for {len(chain.blocks)} blocks of {block_size}")
        if len(chain.cache_root) not in (0, HASH_BYTES):
            raise InvalidMessage(f"{where}.cache_root: {len(chain.cache_root)} bytes, not {HASH_BYTES}")
        if len(chain.adapter) > MAX_NAME_CHARS:
            raise InvalidMessage(f"{where}.adapter: more than {MAX_NAME_CHARS} characters")
        parent = chain.parent if chain.HasField("parent") else None
        for number, name in enumerate(chain.blocks):
            tokens = array("I", chain.token_ids[block_size * number : block_size * (number + 1)])
            yield MeshBlock(name, parent, tokens, chain.cache_root, chain.adapter)
            parent = name
