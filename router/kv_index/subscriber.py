"""The subscriber keeps the prefix index up to date: KV events come from Redis, and the full list from a worker when events are
missing.

    new worker ──► list ──► follow ── next event in order ──► apply
                    ▲          │
                    └── gap ───┘   also: an invalid entry, and a Redis that comes back

Without Redis a worker is listed once, and after that only what this router sends it counts.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc.aio

from pdmesh.runtime.registry.block_stream import BlockStream, Entry, Source
from pdmesh.v1 import worker_pb2
from router.fleet.following import LOOK_PERIOD_S, CallEnd, Gap, InvalidMessage, alive_workers, call_again_while, look_forever
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.kv_index.index import PrefixIndex
from router.routing.worker_snapshot import WorkerKey

READ_GAP_S = 0.02
DOWN_PERIOD_S = 0.25
LIST_TIMEOUT_S = 10.0
MAX_LISTS = 4
MAX_TIER_BLOCKS = 1 << 22
"""Most blocks that a worker may say its tiers hold: some 128 GB of a small model's KV, and 32 MB of hashes here while listed."""
FIRST_LIST_GAP_S, MAX_LIST_GAP_S = 0.5, 60.0
_NEVER_AGAIN = (grpc.StatusCode.UNIMPLEMENTED,)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Followed:
    """Hold one incarnation of a worker. `position`: sequence number up to which the index is current, None until listed.
    `gap`: the delay before the next list; it grows until an event fits. `refuses`: the worker has no lists."""

    worker: Worker
    info: worker_pb2.WorkerInfo
    position: int | None = None
    refuses: bool = False
    gap: Gap = field(default_factory=lambda: Gap(FIRST_LIST_GAP_S, MAX_LIST_GAP_S))
    listing: asyncio.Task[None] | None = None

    @property
    def key(self) -> WorkerKey:
        """Return the worker's key in the index."""
        return (self.info.address, self.info.epoch)

    @property
    def source(self) -> Source:
        """Return the worker's key in the registry's streams."""
        return (self.info.worker_id, self.info.epoch)


class PrefixFollower:
    """Follow all workers of a fleet, on one event loop, from `start` to `stop`."""

    def __init__(self, fleet: FleetRegistry, index: PrefixIndex, stream: BlockStream | None) -> None:
        """Create it. `stream` None: there is no Redis. `stop` closes it."""
        self._fleet = fleet
        self._index = index
        self._stream = stream
        self._followed: dict[WorkerKey, Followed] = {}
        self._forgetting: dict[WorkerKey, asyncio.Task[None]] = {}
        self._lists = asyncio.Semaphore(MAX_LISTS)
        self._is_up: bool | None = None  # None: nothing was read yet
        self._tasks: list[asyncio.Task[None]] = []
        self.on_listed: Callable[[Worker, worker_pb2.WorkerInfo], None] | None = None
        """Is called whenever the blocks of a worker have become known."""

    def start(self) -> None:
        """Start the tasks, and return at once."""
        self._fleet.on_weights = self.look  # at once: what is asked now is looked up, and noted, by the names of its blocks
        looking = look_forever(self._fleet, self.look, logger, "workers to follow")
        self._tasks.append(asyncio.create_task(looking, name="workers of the prefix index"))
        if self._stream is not None:
            self._tasks.append(asyncio.create_task(self._read_forever(self._stream), name="changes of the prefix index"))

    async def stop(self) -> None:
        """Stop all tasks; the index stays as it is."""
        self._fleet.on_weights = None
        listing = [each.listing for each in self._followed.values() if each.listing is not None]
        tasks = (*self._tasks, *listing, *self._forgetting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._stream is not None:
            await self._stream.stop()

    def look(self) -> None:
        """Start to follow new workers, and remove those that are lost."""
        alive = alive_workers(self._fleet)
        replaced = [key for key in alive.keys() & self._followed.keys() if self._has_other_weights(key, alive[key])]
        if alive.keys() == self._followed.keys() and not replaced:
            return
        for key in self._followed.keys() - alive.keys():
            self._forget(self._followed.pop(key))
        for key in alive.keys() - self._followed.keys():
            incarnation = alive[key].current
            if incarnation is not None:
                self._followed[key] = Followed(alive[key], incarnation.info)
                self._list(self._followed[key])
        self._index.set_workers(each.info for each in self._followed.values())
        self._tell_followed()

    def _has_other_weights(self, key: WorkerKey, worker: Worker) -> bool:
        """Return whether a worker computes with other weights than before, and take its new description: the blocks of its
        prompts have other names from now on."""
        current, followed = worker.current, self._followed[key]
        if current is None or current.info is followed.info or current.info.identity == followed.info.identity:
            return False
        followed.info = current.info
        return True

    def take(self, entries: Iterable[Entry]) -> None:
        """Apply the entries that follow in order; any other entry makes its worker be listed."""
        by_source = {each.source: each for each in self._followed.values()}
        for entry in entries:
            followed = by_source.get(entry.source)
            if followed is not None and followed.position is not None and entry.sequence not in range(1, followed.position + 1):
                self._take(followed, followed.position, entry)

    def _take(self, followed: Followed, position: int, entry: Entry) -> None:
        if entry.change is None:
            logger.warning("a change of %s's blocks is refused: %s", followed.info.worker_id, entry.problem)
            self._list(followed)
        elif entry.sequence != position + 1:
            logger.info("changes %d to %d of %s's blocks are missing", position + 1, entry.sequence - 1, followed.info.worker_id)
            self._list(followed)
        else:
            change = entry.change
            self._index.apply(followed.key, change.stored, change.evicted, change.tier_stored, change.tier_evicted)
            followed.position = entry.sequence
            followed.gap.reset()

    def _forget(self, followed: Followed) -> None:
        listing, key = followed.listing, followed.key
        if listing is not None:
            listing.cancel()
        self._forgetting[key] = asyncio.create_task(self._forget_after(listing, key), name=f"forget blocks of {key[0]}")

    async def _forget_after(self, listing: asyncio.Task[None] | None, key: WorkerKey) -> None:
        try:
            if listing is not None:
                await asyncio.gather(listing, return_exceptions=True)
            await self._index.forget(key)
        except Exception:  # a bug here costs memory, and must not stop the worker from being listed when it comes back
            logger.exception("forgetting the blocks of %s failed", key[0])
        finally:
            del self._forgetting[key]

    def _tell_followed(self) -> None:
        self._index.set_followed(key for key, each in self._followed.items() if self._is_up and each.position is not None)

    def _list(self, followed: Followed) -> None:
        """List the worker's blocks in a task; its events are ignored until that is done."""
        followed.position, followed.refuses = None, False
        if followed.listing is None or followed.listing.done():
            followed.listing = asyncio.create_task(
                self._list_until_done(followed), name=f"list blocks of {followed.info.address}"
            )

    async def _list_until_done(self, followed: Followed) -> None:
        if (forgetting := self._forgetting.get(followed.key)) is not None:
            await forgetting  # the same incarnation was lost for a moment
        await call_again_while(
            lambda: followed.position is None and not followed.refuses,
            lambda: self._list_once(followed),
            lambda end: _note_end(followed, end),
            followed.gap,
        )

    async def _list_once(self, followed: Followed) -> None:
        """List once. Raises InvalidMessage, AioRpcError; CancelledError also when only the call is cancelled, as its channel
        closes."""
        async with self._lists:
            sequence, names, tier_names = await _all_blocks(followed)
        await self._index.replace(followed.key, names, tier_names)
        followed.position = sequence
        self._tell_followed()
        if self.on_listed is not None:
            self.on_listed(followed.worker, followed.info)

    async def _read_forever(self, stream: BlockStream) -> None:
        while True:
            try:
                positions = self._positions()
                entries = await stream.read(positions)
                self._answered(entries is not None)
                self.take(entries or [])
                gap_s = DOWN_PERIOD_S if entries is None else READ_GAP_S if positions else LOOK_PERIOD_S
            except Exception:  # a bug here costs speed, and must not cost more
                logger.exception("following the changes of blocks failed")
                gap_s = DOWN_PERIOD_S
            await asyncio.sleep(gap_s)

    def _positions(self) -> dict[Source, int]:
        return {each.source: each.position for each in self._followed.values() if each.position is not None}

    def _answered(self, is_up: bool) -> None:
        """Record whether Redis answers. After an outage it may have lost events, so all workers are listed."""
        if is_up == self._is_up:
            return
        was_up, self._is_up = self._is_up, is_up
        if was_up is False:
            for each in self._followed.values():
                each.gap.at_least_first()
                self._list(each)
        self._tell_followed()


def _note_end(followed: Followed, end: CallEnd) -> None:
    """Log why a list did not come, and whether the worker will never send one."""
    if end.bug is not None:
        logger.error("listing the blocks of %s failed", followed.info.worker_id, exc_info=end.bug)
    elif end.is_invalid:
        logger.warning("the blocks of %s are refused: %s", followed.info.worker_id, end.problem)
    elif end.problem is not None:
        logger.info("the blocks of %s are not known: %s", followed.info.worker_id, end.problem)
        followed.refuses = end.code in _NEVER_AGAIN


async def _all_blocks(followed: Followed) -> tuple[int, list[int], list[int]]:
    """Return sequence number, and the hashes of the blocks in the pool and in the tiers. Raises InvalidMessage, AioRpcError."""
    names: list[int] = []
    tier_names: list[int] = []
    sequence: int | None = None
    call = followed.worker.list_blocks(LIST_TIMEOUT_S)
    try:
        async for part in call:
            if part.epoch != followed.info.epoch:
                raise InvalidMessage(f"epoch {part.epoch:016x} is not the worker's {followed.info.epoch:016x}")
            if sequence not in (None, part.sequence):
                raise InvalidMessage(f"sequence {part.sequence} differs from {sequence} in the part before")
            sequence = part.sequence
            names.extend(part.blocks)
            if len(names) > followed.info.num_blocks:
                raise InvalidMessage(f"blocks are more than the worker's num_blocks, {followed.info.num_blocks}")
            tier_names.extend(part.tier_blocks)
            if len(tier_names) > MAX_TIER_BLOCKS:
                raise InvalidMessage(f"tier_blocks are more than {MAX_TIER_BLOCKS}")
            if part.is_last:
                return sequence, names, tier_names
    finally:
        call.cancel()  # drops further messages
    raise InvalidMessage("is_last is in no part")
