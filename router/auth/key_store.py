"""The keys that a router knows: read when it starts, followed in the background, asked without waiting.

What was read last stands while its source is away or broken: a Redis that is down, or a file half written by hand, locks nobody
out and lets nobody in. A revoked key works for at most `PERIOD_S` after that, while the source can be read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import Unavailable
from pdmesh.runtime.file_stamp import Stamp, stamp_of
from router.auth import key_file
from router.auth.api_keys import ApiKey, KeyProblem, KeyTable
from router.auth.redis_keys import RedisKeys

PERIOD_S = 1.0
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
RETRY_DELAY_S = 1.0

logger = logging.getLogger(__name__)
Read = Callable[[], Awaitable[KeyTable | None]]


class KeyStore:
    """One router's keys. `read` gives the table; None: as it was."""

    def __init__(self, read: Read, close: Callable[[], Awaitable[None]] | None = None) -> None:
        self._read = read
        self._close = close
        self._table: KeyTable | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read for the first time, then follow."""
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="follow API keys")

    async def stop(self) -> None:
        """Ends the following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._close is not None:
            await self._close()

    def find(self, shown: str) -> ApiKey | None:
        """The key that a client shows, if it is good now. Raises Unavailable while no keys could be read at all."""
        if self._table is None:
            raise Unavailable("the API keys cannot be read yet; retry later", retry_delay_s=RETRY_DELAY_S)
        key = self._table.find(shown)
        return key if key is not None and key.is_good(time.time()) else None

    async def refresh(self) -> None:
        """Take what the source has now."""
        try:
            table = await self._read()
        except (OSError, KeyProblem) as error:
            logger.error("the API keys cannot be read: %s; those read before stand", error)
            return
        except Exception:  # who stopped to look would let revoked keys in for as long as he lives
            logger.exception("reading the API keys failed; those read before stand")
            return
        if table is not None:
            self._table = table

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.refresh()


def open_store(source: str, mesh: str) -> KeyStore | None:
    """`source`: a file, or the URL of a Redis; empty: nobody needs a key. Raises ConfigError for what cannot be read now."""
    if not source:
        return None
    if source.startswith(REDIS_SCHEMES):
        keys = RedisKeys(source, mesh)
        return KeyStore(keys.read_changed, keys.close)
    reader = _FileReader(Path(source))
    try:
        key_file.read_key_file(reader.path)
    except (OSError, KeyProblem) as error:
        raise ConfigError("--api-keys", f"{error}", "make one with: pdmesh keys new --keys FILE --name NAME") from error
    return KeyStore(reader.read)


class _FileReader:
    """Reads a file when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: Stamp | None = None

    async def read(self) -> KeyTable | None:
        stamp = stamp_of(self.path)
        if stamp == self._stamp:
            return None
        self._stamp = stamp  # also of a file that is wrong: it is reported once
        return await asyncio.to_thread(key_file.read_key_file, self.path)
