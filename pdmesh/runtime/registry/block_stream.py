"""Publishes changes of workers' prefix caches through Redis Streams: one stream for each incarnation of a worker.

    key    pdmesh:<mesh>:blocks:<worker_id>:<epoch, 16 hex digits>
    entry  id <sequence>-1, one field "c": a serialized BlockChange

The sequence is the entry's id, so that writing one twice does nothing, and a reader asks for "after the one I know". Streams are
short and expire: a reader that is too late asks the worker itself. Nothing raises because Redis is down, slow or full of garbage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.redis_link import RedisLink
from pdmesh.v1.worker_pb2 import BlockChange

MAX_ENTRIES = 256  # about ten seconds of a busy worker
MAX_NAMES = 1 << 16  # of the pool in one change, and as many of the tiers
MAX_BYTES = 2 * 16 * MAX_NAMES
STREAM_TTL_S = 60.0
READ_TIMEOUT_S = 0.5  # waiting for an entry
READ_COUNT = 64  # entries of one stream per read
_FIELD = b"c"
_MAX_SEQUENCE = (1 << 63) - 1

Source = tuple[str, int]
"""worker_id and epoch."""


class InvalidChange(ValueError):
    """Raised for an invalid entry; the message names the field."""


@dataclass(frozen=True)
class Entry:
    """Hold one entry of a stream: a change, or why it is invalid. `sequence` 0: even its id is invalid."""

    source: Source
    sequence: int
    change: BlockChange | None
    problem: str = ""


class BlockStream:
    """Access one mesh's streams. On one event loop; close with `stop`."""

    def __init__(
        self, url: str, mesh: str = "default", *, timeout_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the client. `timeout_s` bounds every operation; above READ_TIMEOUT_S. Raises ConfigError for a malformed URL or
        mesh name."""
        try:
            self._mesh = records.check_id("mesh", mesh)
        except records.InvalidRecord as error:
            raise ConfigError("--mesh", str(error)) from None
        self._link = RedisLink(url, timeout_s=timeout_s, clock=clock)

    async def append(self, worker_id: str, change: BlockChange) -> bool:
        """Write a change; idempotent. False: Redis did not accept it."""
        key, entry_id = self.key((worker_id, change.epoch)), f"{change.sequence}-1"
        payload = change.SerializeToString()
        return bool(await self._link.call(lambda redis: _append(redis, key, entry_id, payload)))

    async def read(self, after: Mapping[Source, int]) -> list[Entry] | None:
        """Return the entries after the known sequence of each source; waits up to READ_TIMEOUT_S for some. None: Redis is
        down."""
        key_of = {self.key(source).encode(): source for source in after}
        positions = {key: f"{after[source]}-1" for key, source in key_of.items()}
        if not positions:
            return []
        answer = await self._link.call(lambda redis: _read(redis, positions))
        if answer is None:
            return None
        return [_entry(source, *raw) for key, raws in answer if (source := key_of.get(key)) is not None for raw in raws]

    async def stop(self) -> None:
        """Close the connection; streams expire."""
        await self._link.close()

    def key(self, source: Source) -> str:
        """Return the key of a source's stream."""
        return f"pdmesh:{self._mesh}:blocks:{source[0]}:{source[1]:016x}"


def decode_change(payload: object, epoch: int, sequence: int) -> BlockChange:
    """Return the change in an entry of the stream of `epoch` with the id `sequence`. Raises InvalidChange for an invalid one."""
    if not isinstance(payload, bytes):
        raise InvalidChange(f"field {_FIELD.decode()} is missing")
    if len(payload) > MAX_BYTES:
        raise InvalidChange(f"field {_FIELD.decode()} has {len(payload)} bytes, more than {MAX_BYTES}")
    try:
        change = BlockChange.FromString(payload)
    except DecodeError as error:
        raise InvalidChange(f"field {_FIELD.decode()} is no BlockChange ({error})") from None
    if change.epoch != epoch:
        raise InvalidChange(f"epoch {change.epoch:016x} is not the stream's {epoch:016x}")
    if change.sequence != sequence:
        raise InvalidChange(f"sequence {change.sequence} is not the entry's {sequence}")
    counts = {
        "stored and evicted": len(change.stored) + len(change.evicted),
        "tier_stored and tier_evicted": len(change.tier_stored) + len(change.tier_evicted),
    }
    for fields, count in counts.items():
        if count > MAX_NAMES:
            raise InvalidChange(f"{fields} are {count} names, more than {MAX_NAMES}")
    return change


def _entry(source: Source, entry_id: object, fields: object) -> Entry:
    sequence = 0
    try:
        sequence = _sequence_of(entry_id)
        payload = fields.get(_FIELD) if isinstance(fields, dict) else None
        return Entry(source, sequence, decode_change(payload, source[1], sequence))
    except InvalidChange as error:
        return Entry(source, sequence, None, str(error))


def _sequence_of(entry_id: object) -> int:
    digits = entry_id.partition(b"-")[0] if isinstance(entry_id, bytes) else b""
    if not digits.isdigit() or not 0 < int(digits[:20]) <= _MAX_SEQUENCE:
        raise InvalidChange(f"id {entry_id!a:.60} has no sequence")
    return int(digits)


async def _append(redis: Redis, key: str, entry_id: str, payload: bytes) -> bool:
    try:
        await _add(redis, key, entry_id, payload)
    except ResponseError as error:
        if "equal or smaller" in str(error) and await _last_id(redis, key) == entry_id.encode():
            return True  # the earlier attempt arrived, but its answer did not
        await redis.delete(key)  # another client wrote there, which it must not
        await _add(redis, key, entry_id, payload)
    return True


async def _add(redis: Redis, key: str, entry_id: str, payload: bytes) -> None:
    pipeline = redis.pipeline(transaction=False)
    pipeline.xadd(key, {_FIELD: payload}, id=entry_id, maxlen=MAX_ENTRIES, approximate=True)
    pipeline.pexpire(key, round(STREAM_TTL_S * 1000))
    for result in await pipeline.execute(raise_on_error=False):
        if isinstance(result, Exception):
            raise result


async def _last_id(redis: Redis, key: str) -> bytes | None:
    last = await redis.xrevrange(key, count=1)
    return cast("bytes", last[0][0]) if last else None


Streams = list[tuple[bytes, list[tuple[object, object]]]]


async def _read(redis: Redis, positions: dict[bytes, str]) -> Streams:
    try:
        answer = await _xread(redis, positions)
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        # One key with foreign data must not keep the others from being read.
        answer = await _xread(redis, await _only_streams(redis, positions))
    return answer


async def _only_streams(redis: Redis, positions: dict[bytes, str]) -> dict[bytes, str]:
    pipeline = redis.pipeline(transaction=False)
    for key in positions:
        pipeline.type(key)
    kinds = await pipeline.execute()
    return {key: position for (key, position), kind in zip(positions.items(), kinds, strict=True) if kind in (b"stream", b"none")}


async def _xread(redis: Redis, positions: dict[bytes, str]) -> Streams:
    if not positions:
        return []
    after = cast("dict[bytes | str | memoryview, int | bytes | str | memoryview]", positions)
    answer = cast("Streams | None", await redis.xread(after, READ_COUNT, round(READ_TIMEOUT_S * 1000)))
    return answer or []
