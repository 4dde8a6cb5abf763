"""Warms workers that start: each is told to fetch the most used prefixes from the workers that have them, one after the other.

    a worker was listed ── hottest prefixes of its kind ──► WarmPrefix(prefix, holder) ... until it has enough, or time is over

The worker decides what it takes: it lets its requests go first, asks for no block that it has, and refuses a second router
meanwhile. Nothing that goes wrong matters to a request.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from pdmesh.v1 import worker_pb2
from router.fleet.heartbeat import being_cancelled
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.kv_index.hot_prefixes import HotPrefix, block_kind
from router.kv_index.index import PrefixIndex
from router.routing.worker_snapshot import WorkerKey

MAX_S = 60.0
"""How long a worker is warmed at most."""
CALL_S = 30.0
RETRY_S = 0.25
MAX_TRIES = 3
"""How often a holder is asked from which nothing came: it, or the worker, may have been busy."""
YOUNG_S = 300.0
"""How long a worker that was listed is warmed as soon as there is something to fetch."""
LOOK_S = 5.0
"""How often that is looked up."""
FIRST_GAP_S, MAX_CALLS_FAILED = 2.0, 4
"""After a call to the worker that failed it is asked again, after a gap that doubles; so many failures are the end."""
EXPIRE_S = 60.0
MAX_AT_ONCE = 4
"""Workers that one router warms at a time."""
_FAILED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_NOT_THIS_ONE = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DEADLINE_EXCEEDED)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Warming:
    """One process of a worker, while it is warmed: `was_asked` for something, `num_tokens` came, `num_failed` calls did not reach
    it."""

    worker: Worker
    info: worker_pb2.WorkerInfo
    ends: float
    spent_s: float = 0.0
    num_tokens: int = 0
    was_asked: bool = False
    has_failed: bool = False
    num_failed: int = 0
    tries: Counter[WorkerKey] = field(default_factory=Counter)  # of holders from which nothing came, in a row

    @property
    def is_there(self) -> bool:
        current = self.worker.current
        return current is not None and current.info.epoch == self.info.epoch


class FleetWarming:
    """Warm the workers of a fleet as they come, on one event loop, until `stop`."""

    def __init__(self, fleet: FleetRegistry, index: PrefixIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._index = index
        self._clock = clock
        self._seen: set[WorkerKey] = set()
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._expiring: asyncio.Task[None] | None = None
        self._hot: dict[tuple[Hashable, int], tuple[float, list[HotPrefix]]] = {}

    def start(self) -> None:
        """Begin to forget prompts that are too old, also where no more come."""
        self._expiring = asyncio.create_task(self._expire_forever(), name="expire recent prompts")

    async def stop(self) -> None:
        """Stop; what workers fetch meanwhile they end themselves."""
        tasks = [*self._tasks, *([] if self._expiring is None else [self._expiring])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            self._index.recent.expire(self._clock())
            self._hot.clear()

    def listed(self, worker: Worker, info: worker_pb2.WorkerInfo) -> None:
        """Begin with a worker whose blocks the index knows now, once. Where there is no prompt yet, it is warmed when there is,
        unless it has blocks: then it is no new one, but the router is."""
        key = (info.address, info.epoch)
        if key in self._seen:
            return
        self._seen = {key, *(other for other in self._seen if not self._fleet.is_gone(other))}
        if info.warm_blocks and (len(self._index.recent) or not self._index.told.blocks_of(key)):
            self._tasks.add(task := asyncio.create_task(self._warm(worker, info), name=f"warm {info.address}"))
            task.add_done_callback(self._tasks.discard)

    async def _warm(self, worker: Worker, info: worker_pb2.WorkerInfo) -> None:
        """Warm a worker once there is something to fetch, in its first minutes; again after calls that failed."""
        warming, young_until = _Warming(worker, info, 0.0), self._clock() + YOUNG_S
        try:
            while True:
                await self._try(warming)
                if warming.was_asked and not (warming.has_failed and warming.num_failed < MAX_CALLS_FAILED):
                    break
                if self._clock() >= young_until or self._fleet.is_gone((info.address, info.epoch)):
                    break
                await asyncio.sleep(FIRST_GAP_S * 2 ** (warming.num_failed - 1) if warming.has_failed else LOOK_S)
        except Exception:  # a bug here costs a cold worker, and must not cost more
            logger.exception("warming %s failed", worker.address)
        if warming.num_tokens:
            logger.info("%s has fetched %d tokens of the most used prefixes", info.worker_id, warming.num_tokens)

    async def _try(self, warming: _Warming) -> None:
        """Have a worker fetch the hottest prefixes, until it takes no more, or a call fails."""
        async with self._at_once:
            began = self._clock()
            warming.ends, warming.has_failed = began + MAX_S - warming.spent_s, False
            warming.tries.clear()
            for prefix in self._hottest(warming.info, began):
                if not await self._fetch(warming, prefix):
                    break
            warming.spent_s += self._clock() - began

    def _hottest(self, info: worker_pb2.WorkerInfo, now: float) -> list[HotPrefix]:
        """Return what to fetch. Many workers may wait for something at a time, so it is computed once for all of a kind."""
        kind, max_blocks = block_kind(info), min(info.warm_blocks, info.num_blocks)
        if kind is None:
            return []
        at, prefixes = self._hot.get((kind, max_blocks), (float("-inf"), []))
        if now - at >= LOOK_S / 2:
            prefixes = self._index.recent.hottest(kind, max_blocks, now)
            self._hot[kind, max_blocks] = (now, prefixes)
        return prefixes

    async def _fetch(self, warming: _Warming, prefix: HotPrefix) -> bool:
        """Have a worker fetch a prefix, from one holder after another; return whether it takes more."""
        size, num_here = warming.info.layout.block_size, 0
        request = prefix.prompt.token_request(len(prefix.names) * size)
        while warming.is_there and self._clock() < warming.ends:
            holder = self._holder(warming, prefix, num_here)
            if holder is None:
                return True
            message = worker_pb2.WarmPrefixRequest(
                epoch=warming.info.epoch, request=request, holder_address=holder[0], holder_epoch=holder[1]
            )
            code, told = await _ask(warming.worker, message)
            warming.was_asked = True
            if code in _FAILED:
                warming.has_failed, warming.num_failed = True, warming.num_failed + 1
            if code is not grpc.StatusCode.OK and code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                return code in _NOT_THIS_ONE
            num_here = max(num_here, told.num_cached_tokens // size)
            self._count(warming, told, prefix.names[:num_here])
            if told.is_over or num_here >= len(prefix.names):
                return not told.is_over
            if code is grpc.StatusCode.OK:
                warming.tries[holder] = 0 if told.num_tokens else warming.tries[holder] + 1
            await asyncio.sleep(RETRY_S)
        return False

    def _count(self, warming: _Warming, told: worker_pb2.WarmPrefixResponse, names: Sequence[int]) -> None:
        warming.num_tokens += told.num_tokens
        self._index.record(warming.info, names)  # before the worker's KV events say so, and where it sends none

    def _holder(self, warming: _Warming, prefix: HotPrefix, num_here: int) -> WorkerKey | None:
        """Return the worker that has most of a prefix, and more than is there; of equal ones the one with least to compute."""
        ours = (warming.info.address, warming.info.epoch)
        known = self._index.holders(prefix.names)
        able = [key for key, blocks in known.items() if blocks > num_here and key != ours and self._can_send(warming, key)]
        return min(able, key=lambda key: (-known[key], self._waiting_tokens(key), key), default=None)

    def _can_send(self, warming: _Warming, key: WorkerKey) -> bool:
        worker = self._fleet.workers.get(key[0])
        current = worker.current if worker is not None else None
        if current is None or current.info.epoch != key[1] or key in self._fleet.suspects or warming.tries[key] >= MAX_TRIES:
            return False
        info, ours = current.info, warming.info
        return info.identity == ours.identity and info.layout == ours.layout and info.revision == ours.revision

    def _waiting_tokens(self, key: WorkerKey) -> int:
        current = self._fleet.workers[key[0]].current
        return 0 if current is None else current.load.num_waiting_tokens


async def _ask(worker: Worker, message: worker_pb2.WarmPrefixRequest) -> tuple[grpc.StatusCode, worker_pb2.WarmPrefixResponse]:
    """Return how a call ended, and what it told."""
    try:
        return grpc.StatusCode.OK, await worker.control.WarmPrefix(message, timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        logger.info("%s was not warmed: %s %s", worker.address, error.code().name, error.details())
        return error.code(), worker_pb2.WarmPrefixResponse()
    except (asyncio.CancelledError, grpc.aio.UsageError) as error:
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        return grpc.StatusCode.CANCELLED, worker_pb2.WarmPrefixResponse()
