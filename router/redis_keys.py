"""API keys in Redis: one hash per mesh, from a key's SHA-256 to its record."""

from __future__ import annotations

import json
import logging
from typing import cast

from redis.asyncio import Redis

from router.keys import ApiKey, KeyProblem, KeyTable
from runtime import records
from runtime.redis_link import RedisLink

logger = logging.getLogger(__name__)


class RedisKeys:
    """The keys of one mesh. Close it after use."""

    def __init__(self, url: str, mesh: str) -> None:
        """Raises ConfigError for a malformed URL, InvalidRecord for a mesh's name."""
        self._link = RedisLink(url)
        self._name = f"pdmesh:{records.check_id('mesh', mesh)}:keys"

    async def read(self) -> KeyTable | None:
        """All of them; None: Redis does not answer. What is no record is left out, and logged."""
        values = await self._link.call(self._read_all)
        if values is None:
            return None
        keys: dict[str, ApiKey] = {}
        for number, value in enumerate(values.values()):
            try:
                key = ApiKey.from_value(json.loads(value))
                keys.setdefault(key.name, key)
            except (KeyProblem, ValueError) as error:
                logger.error("entry %d of %s in Redis is no API key: %s", number, self._name, error)
        return KeyTable(keys.values())

    async def add(self, key: ApiKey) -> bool:
        """False: Redis does not answer."""

        async def put(redis: Redis) -> bool:
            await redis.hset(self._name, key.hash, key.to_json())
            return True

        return bool(await self._link.call(put))

    async def remove(self, key: ApiKey) -> bool:
        """False: Redis does not answer."""

        async def delete(redis: Redis) -> bool:
            await redis.hdel(self._name, key.hash)
            return True

        return bool(await self._link.call(delete))

    async def close(self) -> None:
        """Closes the connection."""
        await self._link.close()

    async def _read_all(self, redis: Redis) -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", await redis.hgetall(self._name))
