"""Which LoRA adapters a mesh is to have, kept in Redis: so routers, workers and their restarts agree.

A name is either wanted from a folder or unwanted; what was never said to a router (adapters that workers were started with) is
neither. Without Redis a router remembers by itself, as long as it runs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from redis.asyncio import Redis

from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.redis_link import RedisLink
from pdmesh.runtime.rpc.mesh_secret import MeshSecret

MAX_ENTRIES = 4096

logger = logging.getLogger(__name__)


class AdapterKey(NamedTuple):
    """Name an adapter of a model."""

    model: str
    name: str


@dataclass(frozen=True)
class Wanted:
    """Say where the workers find an adapter and what is in it. Empty: they are not to have it."""

    folder: str
    digest: str

    @property
    def is_wanted(self) -> bool:
        return bool(self.folder)


UNWANTED = Wanted("", "")


class WantedAdapters:
    """Hold what is wanted; `refresh` exchanges it with Redis."""

    def __init__(self, url: str, mesh: str, secret: MeshSecret | None = None) -> None:
        """Without a `url` nothing is exchanged. With `secret` entries are sealed and others ignored: workers open the folders
        that they name. Raises ConfigError for a malformed URL."""
        self._secret = secret
        self._ignored: set[bytes] = set()
        self._of_former_secret: set[AdapterKey] = set()
        self._link = RedisLink(url) if url else None
        self._redis_key = f"pdmesh:{records.check_id('mesh', mesh)}:adapters"
        self._entries: dict[AdapterKey, Wanted] = {}
        self._unwritten: set[AdapterKey] = set()

    @property
    def entries(self) -> Mapping[AdapterKey, Wanted]:
        return self._entries

    async def put(self, key: AdapterKey, wanted: Wanted) -> None:
        """Remember it. While Redis is away this router alone knows; the next `refresh` tells the others."""
        self._entries[key] = wanted
        self._unwritten.add(key)
        await self._write()

    async def refresh(self) -> None:
        """Write what Redis lacks, then take over what it holds."""
        if self._link is None or not await self._write():
            return
        stored = await self._link.call(self._read)
        if stored is not None and not self._unwritten:
            self._entries = stored
            for key in self._of_former_secret & stored.keys():  # sealed again before that secret is removed
                await self.put(key, stored[key])
            self._of_former_secret.clear()

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()

    async def _write(self) -> bool:
        if self._link is None:
            self._unwritten.clear()
            return False
        for key in list(self._unwritten):
            field, value = json.dumps(key), json.dumps([self._entries[key].folder, self._entries[key].digest])
            sealed = value if self._secret is None else self._secret.seal(field, 0, value.encode())
            if await self._link.call(lambda redis, f=field, v=sealed: _put(redis, self._redis_key, f, v)) is None:  # type: ignore[misc]
                return False
            self._unwritten.discard(key)
        return True

    async def _read(self, redis: Redis) -> dict[AdapterKey, Wanted]:
        stored = await cast("Awaitable[dict[bytes, bytes]]", redis.hgetall(self._redis_key))
        return dict(
            entry for field, value in list(stored.items())[:MAX_ENTRIES] if (entry := self._opened(field, value)) is not None
        )

    def _opened(self, field: bytes, value: bytes) -> tuple[AdapterKey, Wanted] | None:
        if self._secret is None:
            return _entry(field, value)
        try:
            entry = _entry(field, self._secret.unseal(field.decode(), 0, value, ages=False))
        except ValueError as error:
            if field not in self._ignored:
                self._ignored.add(field)
                logger.warning("the adapter %a in Redis is ignored: %s", field[:200], error)
            return None
        if entry is not None and not self._secret.is_newest_seal(field.decode(), 0, value):
            self._of_former_secret.add(entry[0])
        return entry


async def _put(redis: Redis, key: str, field: str, value: str | bytes) -> int:
    return int(await redis.hset(key, field, value))


def _entry(field: bytes, value: bytes) -> tuple[AdapterKey, Wanted] | None:
    """Return an entry; None for one that no router wrote."""
    try:
        model, name = json.loads(field)
        folder, digest = json.loads(value)
    except (ValueError, TypeError):
        logger.warning("an adapter in Redis is ignored: %a is no entry", field[:200])
        return None
    texts = (model, name, folder, digest)
    return (AdapterKey(model, name), Wanted(folder, digest)) if all(isinstance(text, str) for text in texts) else None
