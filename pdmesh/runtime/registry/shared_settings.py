"""Settings that clients change while a mesh runs, and that its routers share: a hash in Redis.

    put ─► this router at once ─► Redis ─► the others at their next refresh, restarts of any router included

Without Redis a router remembers by itself, as long as it runs. While Redis is away each router goes on with what it knows; what
was put meanwhile is written as soon as it is back.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar, cast

from redis.asyncio import Redis

from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.redis_link import RedisLink
from pdmesh.runtime.rpc.mesh_secret import MeshSecret

MAX_ENTRIES = 4096
PERIOD_S = 1.0
FIRST_READ_S = 2.0
"""For so long a start waits for Redis."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

logger = logging.getLogger(__name__)


class SharedSettings(ABC, Generic[K, V]):
    """Hold entries by key; `refresh` exchanges them with Redis. What it holds is checked: another program may have written it."""

    def __init__(self, url: str, mesh: str, name: str, secret: MeshSecret | None = None) -> None:
        """Keep them under `name` in Redis; without a `url` nothing is exchanged. With `secret` entries are sealed and others
        ignored. Raises ConfigError for a malformed URL."""
        self._secret = secret
        self._ignored: set[bytes] = set()
        self._of_former_secret: dict[K, bytes] = {}
        self._generation = 0
        self._link = RedisLink(url) if url else None
        self._name, self._redis_key = name, f"pdmesh:{records.check_id('mesh', mesh)}:{name}"
        self._entries: dict[K, V] = {}
        self._unwritten: set[K] = set()
        self.was_read = False  # whether Redis has ever told what it holds

    @abstractmethod
    def _dump(self, key: K, value: V) -> tuple[str, str]:
        """Return the field of the hash and its value."""

    @abstractmethod
    def _load(self, field: bytes, value: bytes) -> tuple[K, V] | None:
        """Return an entry; None, or a ValueError or TypeError, for one that no router wrote."""

    @property
    def entries(self) -> Mapping[K, V]:
        """Return what is known now."""
        return self._entries

    async def put(self, key: K, value: V) -> None:
        """Remember it. While Redis is away this router alone knows; the next `refresh` tells the others."""
        self._entries[key] = value
        self._unwritten.add(key)
        self._generation += 1
        await self._write()

    def forget(self, key: K) -> None:
        """Drop an entry here; where there is a Redis, that has it still."""
        self._entries.pop(key, None)

    async def refresh(self) -> None:
        """Write what Redis lacks, then take over what it holds. Entries are changed and never deleted: one that is missing there
        was lost with a Redis that came back empty."""
        if self._link is None or not await self._write():
            return
        generation = self._generation
        stored = await self._link.call(self._read)
        self.was_read |= stored is not None
        # Where one was put meanwhile, what was read may be from before.
        if stored is not None and not self._unwritten and self._generation == generation:
            lost = {key: value for key, value in self._entries.items() if key not in stored and len(stored) < MAX_ENTRIES}
            self._entries = {**lost, **stored}
            await self._restore(lost)

    async def read_first(self) -> None:
        """Refresh before anything else is done, for a moment at most: a start does not wait for a Redis that is away."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READ_S):
                await self.refresh()

    async def refresh_forever(self, then: Callable[[], None] = lambda: None) -> None:
        """Refresh every PERIOD_S, and call `then` each time, until cancelled. What fails is logged."""
        while True:
            try:
                await self.refresh()
                then()
            except Exception:  # neither what stands in Redis nor a bug with one worker must stop it
                logger.exception("keeping %s failed", self._name)
            await asyncio.sleep(PERIOD_S)

    async def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            await self._link.close()

    async def _write(self) -> bool:
        if self._link is None:
            self._unwritten.clear()
            return False
        for key in list(self._unwritten):
            value = self._entries[key]
            field, sealed = self._sealed(key, value)
            if await self._link.call(lambda redis, f=field, v=sealed: _put(redis, self._redis_key, f, v)) is None:  # type: ignore[misc]
                return False
            if self._entries[key] == value:  # else it was put again meanwhile
                self._unwritten.discard(key)
        return True

    async def _restore(self, lost: Mapping[K, V]) -> None:
        """Write what Redis has lost, and seal again what is sealed with a former secret, before that is removed. What another
        router has written meanwhile stays."""
        assert self._link is not None
        former, self._of_former_secret = self._of_former_secret, {}
        for key, value in list(self._entries.items()):
            if (key in lost or key in former) and self._entries[key] == value:  # else it was put meanwhile
                field, sealed = self._sealed(key, value)
                arguments = (self._redis_key, field, former.get(key, b""), sealed)
                await self._link.call(lambda redis, a=arguments: _swap(redis, *a))  # type: ignore[misc]

    def _sealed(self, key: K, value: V) -> tuple[str, str | bytes]:
        field, text = self._dump(key, value)
        return field, text if self._secret is None else self._secret.seal(field, 0, text.encode())

    async def _read(self, redis: Redis) -> dict[K, V]:
        stored = await cast("Awaitable[dict[bytes, bytes]]", redis.hgetall(self._redis_key))
        opened = (self._opened(field, value) for field, value in list(stored.items())[:MAX_ENTRIES])
        return dict(entry for entry in opened if entry is not None)

    def _opened(self, field: bytes, value: bytes) -> tuple[K, V] | None:
        if self._secret is None:
            return self._checked(field, value)
        try:
            content = self._secret.unseal(field.decode(), 0, value, ages=False)
        except ValueError as error:
            if field not in self._ignored:
                self._ignored.add(field)
                logger.warning("the entry %a of %s in Redis is ignored: %s", field[:200], self._name, error)
            return None
        entry = self._checked(field, content)
        if entry is not None and not self._secret.is_newest_seal(field.decode(), 0, value):
            self._of_former_secret[entry[0]] = value
        return entry

    def _checked(self, field: bytes, value: bytes) -> tuple[K, V] | None:
        try:
            entry = self._load(field, value)
        except (ValueError, TypeError, OverflowError, RecursionError):
            entry = None
        if entry is None:
            logger.warning("an entry of %s in Redis is ignored: %a is none", self._name, field[:200])
        return entry


_SWAP = """
local now = redis.call('HGET', KEYS[1], ARGV[1])
if now == ARGV[2] or (not now and ARGV[2] == '') then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
"""
"""Writes a field that is still what was read; an empty text stands for one that is missing."""


async def _swap(redis: Redis, key: str, field: str, before: bytes, value: str | bytes) -> None:
    await redis.eval(_SWAP, 1, key, field, before, value)


async def _put(redis: Redis, key: str, field: str, value: str | bytes) -> int:
    return int(await redis.hset(key, field, value))
