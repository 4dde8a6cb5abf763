"""The registry of a mesh: workers and routers, registered in Redis with a time to live.

The registry is a directory, not the truth: a worker whose stream lives is alive whatever the registry says. Nothing raises
because Redis is down, slow, hanging, empty or full of garbage; reads then return the last known snapshot with its age, writes
return False, and both resume by themselves when Redis is back.

A record belongs to the newest process that registered its id: an older one (paused, then resumed; or still draining) neither
overwrites nor deletes it. Reading scans the keys of the selected database, so on a large shared Redis the mesh should have its
own database.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.redis_link import RedisLink
from pdmesh.runtime.rpc.mesh_secret import FLAG, MeshSecret, is_sealed
from pdmesh.v1.worker_pb2 import WorkerInfo

Kind = Literal["worker", "router"]
OnChange = Callable[[list[WorkerInfo]], None]
T = TypeVar("T")
MAX_RECORDS = 10_000
_DAY_US = 86_400_000_000

_HEAD = """
local head = ''
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'string' then head = redis.call('GETRANGE', KEYS[1], 0, 63) end
local generation, epoch = string.match(head, '^PDM1:(%d+):(%x+):')
generation = tonumber(generation or '0')
"""
# ARGV: generation (0: first registration of this process), epoch, payload, ttl in ms. Returns the record's generation; 0: another
# process registered this id later, and its record stands. A generation far in the future is garbage, not a process.
_PUT = (
    _HEAD
    + f"""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if generation > now + {_DAY_US} then generation, epoch = 0, nil end
local mine = tonumber(ARGV[1])
if epoch == ARGV[2] then mine = generation
elseif mine == 0 then mine = math.max(now, generation + 1)
elseif generation > mine then return 0 end
if kind ~= 'string' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], string.format('PDM1:%016d:%s:', mine, ARGV[2]) .. ARGV[3], 'PX', ARGV[4])
return mine
"""
)
# ARGV: epoch. Deletes the record if it is this process's own.
_REMOVE = (
    _HEAD
    + """
if epoch == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """Hold what was last read: workers by id, router addresses by id, and when (`taken_at`, monotonic seconds; None: never)."""

    workers: dict[str, WorkerInfo]
    routers: dict[str, str]
    taken_at: float | None


class Registry:
    """Access one mesh's registry. On one event loop; close with `stop`."""

    def __init__(
        self,
        url: str,
        mesh: str = "default",
        *,
        ttl_s: float = 3.0,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        secret: MeshSecret | None = None,
    ) -> None:
        """Create the client. A record lives `ttl_s` seconds without renewal. With `secret` records are sealed and others
        ignored. Raises ConfigError for a malformed URL or mesh name."""
        try:
            self._mesh = records.check_id("mesh", mesh)
        except records.InvalidRecord as error:
            raise ConfigError("--mesh", str(error)) from None
        self._link = RedisLink(url, timeout_s=timeout_s, clock=clock)
        self.ttl_s = ttl_s
        self._clock = clock
        self._secret = secret
        self._generations: dict[str, int] = {}
        self._ousted: set[str] = set()  # keys that newer processes own
        self._invalid: dict[bytes, str] = {}
        self._watcher: asyncio.Task[None] | None = None
        self.num_invalid_records = 0
        self.snapshot = Snapshot({}, {}, None)

    @property
    def connected(self) -> bool:
        """Return whether the last operation reached Redis."""
        return self._link.connected

    def age_s(self) -> float | None:
        """Return the seconds since the snapshot was read; None: never read."""
        return None if self.snapshot.taken_at is None else self._clock() - self.snapshot.taken_at

    async def register(self, info: WorkerInfo) -> bool:
        """Write the record of a process that starts, whichever process had the id before. False: Redis did not accept it (`renew`
        will try again).

        Raises InvalidRecord when `info` itself is wrong, since no reader would accept it."""
        records.check_worker(info)
        self._generations.pop(self._key("worker", info.worker_id), None)
        return await self.renew(info)

    async def renew(self, info: WorkerInfo) -> bool:
        """Write the record again, with new content if it changed. False: Redis is down, or a newer process owns the id."""
        records.check_worker(info)
        return await self._put(self._key("worker", info.worker_id), info.epoch, info.SerializeToString())

    async def deregister(self, info: WorkerInfo) -> bool:
        """Delete the record if it is still this process's. False: it was gone already, or Redis is down (the record then
        expires)."""
        return await self._remove(self._key("worker", info.worker_id), info.epoch)

    async def register_router(self, router_id: str, address: str, epoch: int) -> bool:
        """Write or renew a router's record; as `renew`."""
        key = self._key("router", records.check_id("router_id", router_id))
        return await self._put(key, epoch, records.check_address(address).encode())

    async def deregister_router(self, router_id: str, epoch: int) -> bool:
        """Delete a router's record; as `deregister`."""
        return await self._remove(self._key("router", router_id), epoch)

    async def list_workers(self) -> list[WorkerInfo]:
        """Return all valid workers now, by id; the last known ones when Redis does not answer."""
        await self.refresh()
        return list(self.snapshot.workers.values())

    async def list_routers(self) -> dict[str, str]:
        """Return the addresses by router id; the last known ones when Redis does not answer."""
        await self.refresh()
        return dict(self.snapshot.routers)

    async def refresh(self) -> bool:
        """Read everything into `snapshot`. False: Redis did not answer and the snapshot is unchanged."""
        values = await self._link.call(self._read)
        if values is None:
            return False
        invalid: dict[bytes, str] = {}
        workers = self._decode("worker", values, records.decode_worker, invalid)
        routers = self._decode("router", values, records.decode_router, invalid)
        self._report_invalid(invalid)
        self.snapshot = Snapshot(workers, routers, self._clock())
        return True

    def start(self, on_change: OnChange, poll_period_s: float = 0.5) -> None:
        """Poll in the background; call `on_change` on the event loop after the first read and whenever the workers differ."""
        self._watcher = asyncio.create_task(self._watch(on_change, poll_period_s), name="registry watcher")

    async def stop(self) -> None:
        """Stop polling and close the connection; records stay until they expire or are deregistered."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        await self._link.close()

    async def _watch(self, on_change: OnChange, poll_period_s: float) -> None:
        known: dict[str, WorkerInfo] | None = None
        while True:
            if await self.refresh() and self.snapshot.workers != known:
                known = self.snapshot.workers
                _tell(on_change, list(known.values()))
            await asyncio.sleep(poll_period_s)

    async def _put(self, key: str, epoch: int, payload: bytes) -> bool:
        if self._secret is not None:
            payload = self._secret.seal(key, epoch, payload)
        arguments = (self._generations.get(key, 0), f"{epoch:016x}", payload, round(self.ttl_s * 1000))
        generation = await self._link.call(lambda redis: _eval(redis, _PUT, key, arguments))
        if generation:
            self._generations[key] = generation
            self._ousted.discard(key)
        elif generation == 0 and key not in self._ousted:
            self._ousted.add(key)
            logger.warning("%s belongs to a newer process now; this one (epoch %016x) leaves it alone", key, epoch)
        return bool(generation)

    async def _remove(self, key: str, epoch: int) -> bool:
        self._generations.pop(key, None)
        return bool(await self._link.call(lambda redis: _eval(redis, _REMOVE, key, (f"{epoch:016x}",))))

    async def _read(self, redis: Redis) -> dict[bytes, bytes | RedisError]:
        """Return the value (or the error of reading it) by key, for all keys of the mesh."""
        keys: list[bytes] = []
        for kind in ("worker", "router"):
            async for key in redis.scan_iter(match=self._key(kind, "*"), count=1000):
                keys.append(key)
                if len(keys) > MAX_RECORDS:
                    raise ResponseError(f"more than {MAX_RECORDS} keys of mesh {self._mesh}; give the mesh a database of its own")
        pipeline = redis.pipeline(transaction=False)
        for key in (unique := sorted(set(keys))):
            # Reading one byte more than is valid detects a value that is too large without reading all of it.
            pipeline.getrange(key, 0, records.MAX_RECORD_BYTES)
        values = await pipeline.execute(raise_on_error=False)
        return {key: value for key, value in zip(unique, values, strict=True) if value != b""}  # b"": expired meanwhile

    def _decode(
        self,
        kind: Kind,
        values: dict[bytes, bytes | RedisError],
        decode: Callable[[str, int, bytes], T],
        invalid: dict[bytes, str],
    ) -> dict[str, T]:
        prefix = self._key(kind, "").encode()
        decoded: dict[str, T] = {}
        for key, value in values.items():
            if not key.startswith(prefix):
                continue
            try:
                if isinstance(value, Exception):
                    raise records.InvalidRecord(f"it cannot be read: {value}")
                id_ = key[len(prefix) :].decode("utf-8")
                epoch, payload = self._opened(key.decode("utf-8"), value)
                decoded[id_] = decode(id_, epoch, payload)
            except ValueError as error:  # InvalidRecord, or a key that is not UTF-8
                invalid[key] = str(error)
        return decoded

    def _opened(self, key: str, value: bytes) -> tuple[int, bytes]:
        """Return epoch and payload of a record. Raises ValueError for an invalid one, or one from outside of the mesh."""
        epoch, payload = records.split(value)
        if self._secret is not None:
            return epoch, self._secret.unseal(key, epoch, payload)
        if is_sealed(payload):
            raise records.InvalidRecord(f"it is signed with a mesh secret, and this process has none; give it {FLAG}")
        return epoch, payload

    def _report_invalid(self, invalid: dict[bytes, str]) -> None:
        """Count and log each garbage record once, and again when its problem changes."""
        for key, problem in invalid.items():
            if self._invalid.get(key) != problem:
                self.num_invalid_records += 1
                logger.warning("registry record %a is ignored: %s; delete it, or find its writer", key[:200], problem)
        self._invalid = invalid

    def _key(self, kind: str, id_: str) -> str:
        return f"pdmesh:{self._mesh}:{kind}:{id_}"


async def _eval(redis: Redis, script: str, key: str, arguments: tuple[str | bytes | int, ...]) -> int:
    return int(await cast("Awaitable[int]", redis.eval(script, 1, key, *cast("tuple[str, ...]", arguments))))


def _tell(on_change: OnChange, workers: list[WorkerInfo]) -> None:
    try:
        on_change(workers)
    except Exception:  # the watcher survives a bug of its listener
        logger.exception("the listener of registry changes failed")


# Keeps a registration alive in the background: writes it at once, renews it in time, withdraws it at the end.
#
#     announcer = worker_announcer(registry, worker.info)      # a callable: the record follows changes of roles
#     announcer.start()
#     announcer.renew_now()                                    # after a change
#     await announcer.stop()                                   # deregisters


class Announcer:
    """Call `put` every `period_s` seconds (and on `renew_now`) until `stop`, then `remove` once."""

    def __init__(self, put: Callable[[], Awaitable[bool]], remove: Callable[[], Awaitable[bool]], period_s: float) -> None:
        self._put = put
        self._remove = remove
        self._period_s = period_s
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the renewals; return at once."""
        self._task = asyncio.create_task(self._run(), name="announcer")

    def renew_now(self) -> None:
        """Renew without waiting for the period."""
        self._wake.set()

    async def stop(self) -> None:
        """End the renewals, then withdraw the record; idempotent."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        await self._remove()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            await self._put_logged()
            try:
                async with asyncio.timeout(self._period_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _put_logged(self) -> None:
        try:
            await self._put()
        except Exception:  # a wrong record must not end the renewals: the next one may be right
            logger.exception("the registration could not be written")


def worker_announcer(registry: Registry, info: Callable[[], WorkerInfo]) -> Announcer:
    """Announce the worker that `info` describes at each renewal."""
    return Announcer(lambda: registry.renew(info()), lambda: registry.deregister(info()), registry.ttl_s / 3)


def router_announcer(registry: Registry, router_id: str, address: str, epoch: int) -> Announcer:
    """Announce a router."""
    return Announcer(
        lambda: registry.register_router(router_id, address, epoch),
        lambda: registry.deregister_router(router_id, epoch),
        registry.ttl_s / 3,
    )
