"""API keys in Redis: one hash per mesh, from a key's SHA-256 to its record, and a number that counts changes of it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any, cast

from redis.asyncio import Redis

from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.redis_link import RedisLink
from router.auth.api_keys import ApiKey, KeyProblem, KeyTable

FULL_PERIOD_S = 30.0
_UNREAD = b"unread"

logger = logging.getLogger(__name__)


class RedisKeys:
    """The keys of one mesh. Close it after use."""

    def __init__(self, url: str, mesh: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for a malformed URL, InvalidRecord for a mesh's name."""
        self._link = RedisLink(url)
        self._name = f"pdmesh:{records.check_id('mesh', mesh)}:keys"
        self._version_name = f"{self._name}:version"
        self._version: bytes | None = _UNREAD
        self._full_at = 0.0
        self._clock = clock

    async def read(self) -> KeyTable | None:
        """All of them; None: Redis does not answer. What is no record is left out, and logged."""
        found = await self._link.call(self._read_all)
        if found is None:
            return None
        self._version, records_read = found
        # Not on the event loop: a hundred thousand keys take it a second.
        return await asyncio.to_thread(_table, self._name, list(records_read.values()))

    async def read_changed(self) -> KeyTable | None:
        """As `read`; None also when nothing has changed since. Who writes without counting is noticed after `FULL_PERIOD_S`."""
        now = self._clock()
        version = await self._link.call(lambda redis: redis.get(self._version_name))
        if self._version != _UNREAD and version == self._version and now < self._full_at:
            return None
        table = await self.read()
        if table is not None:
            self._full_at = now + FULL_PERIOD_S
        return table

    async def add(self, key: ApiKey) -> bool:
        """False: Redis does not answer."""

        async def put(redis: Redis) -> bool:
            both: Any  # its commands return itself here, which its types do not say
            async with redis.pipeline(transaction=True) as both:
                await both.hset(self._name, key.hash, key.to_json()).incr(self._version_name).execute()
            return True

        return bool(await self._link.call(put))

    async def remove(self, key: ApiKey) -> bool:
        """False: Redis does not answer."""

        async def delete(redis: Redis) -> bool:
            both: Any
            async with redis.pipeline(transaction=True) as both:
                await both.hdel(self._name, key.hash).incr(self._version_name).execute()
            return True

        return bool(await self._link.call(delete))

    async def close(self) -> None:
        """Closes the connection."""
        await self._link.close()

    async def _read_all(self, redis: Redis) -> tuple[bytes | None, dict[bytes, bytes]]:
        """The version comes with the keys, in one transaction: what changes after it is seen the next time."""
        both: Any
        async with redis.pipeline(transaction=True) as both:
            version, found = await both.get(self._version_name).hgetall(self._name).execute()
        return version, cast("dict[bytes, bytes]", found)


def _table(name: str, values: list[bytes]) -> KeyTable:
    keys: dict[str, ApiKey] = {}
    for number, value in enumerate(values):
        try:
            key = ApiKey.from_value(json.loads(value))
            keys.setdefault(key.name, key)
        except (KeyProblem, ValueError, RecursionError) as error:
            logger.error("entry %d of %s in Redis is no API key: %s", number, name, error)
    return KeyTable(keys.values())
