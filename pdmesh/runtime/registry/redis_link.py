"""Holds one connection to Redis that never raises and never blocks for long: operations time out, failures back off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdmesh.runtime.config import ConfigError

T = TypeVar("T")
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0

logger = logging.getLogger(__name__)


class RedisLink:
    """Connect to Redis. `call` runs an operation and returns None when Redis is down, slow, hanging or refusing; during a
    back-off it does so at once."""

    def __init__(self, url: str, *, timeout_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the link. `timeout_s` seconds bound a whole operation. Raises ConfigError for a malformed URL; connects only at
        the first call."""
        self._redis = open_redis(url, timeout_s)
        self._shown_url = without_password(url)
        self._timeout_s = timeout_s
        self._clock = clock
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at: float | None = None
        self.connected = False

    async def call(self, operation: Callable[[Redis], Awaitable[T]]) -> T | None:
        """Return the operation's result, or None."""
        if self._retry_at is not None and self._clock() < self._retry_at:
            return None
        task = asyncio.current_task()
        assert task is not None
        num_cancels = task.cancelling()
        result = await self._attempt(operation)
        if task.cancelling() > num_cancels:
            # The client library loses a cancellation that comes while it connects; the canceller waits for our end.
            raise asyncio.CancelledError
        return result

    async def _attempt(self, operation: Callable[[Redis], Awaitable[T]]) -> T | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await operation(self._redis)
        except Exception as error:  # noqa: BLE001 - logged by _failed
            # The server on that port may not be Redis at all, and the client then raises ValueError, IndexError and the like.
            unexpected = not isinstance(error, (RedisError, OSError, TimeoutError))
            self._failed(error, error if unexpected else None)
            return None
        self._succeeded()
        return result

    async def close(self) -> None:
        """Close the connection."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.aclose()
        except (RedisError, OSError, TimeoutError) as error:
            logger.debug("closing the connection to Redis: %r", error)
        self.connected = False

    def _succeeded(self) -> None:
        if not self.connected:
            logger.info("connected to Redis at %s", self._shown_url)
        self.connected = True
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = None

    def _failed(self, error: Exception, traceback_of: Exception | None) -> None:
        if self.connected or self._retry_at is None:
            reason = str(error) or f"no answer within {self._timeout_s} s"
            text = "Redis at %s does not serve (%s); going on with what is known, trying again"
            logger.warning(text, self._shown_url, reason, exc_info=traceback_of)
        self.connected = False
        self._retry_at = self._clock() + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)


async def why_silent(url: str, timeout_s: float = 1.0) -> str | None:
    """Ask the Redis at `url` once: return None when it answers, else the reason. Raises ConfigError for a malformed URL."""
    redis = open_redis(url, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await redis.ping()
            return None
    except Exception as error:  # noqa: BLE001 - what answers there may be no Redis at all
        return str(error) or f"no answer within {timeout_s:g} s"
    finally:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await redis.aclose()


def open_redis(url: str, timeout_s: float) -> Redis:
    """Return a client without retries of its own. Raises ConfigError for a malformed URL; connects only at its first use."""
    try:
        return Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            decode_responses=False,
        )
    except ValueError as error:
        # The error's own text is not shown: for a password with a / in it, it quotes a part as the port.
        problem = f"{without_password(url)!r} is no Redis URL ({type(error).__name__})"
        raise ConfigError("--redis", problem, "give redis://host:port/0") from None


def without_password(url: str) -> str:
    """Return the URL as it may be shown: scheme, and what follows the last @. A password may hold any character, / and # among
    them; if the @ may be one of a password in the query, nothing of the rest is shown."""
    scheme, separator, rest = url.partition("://")
    user, _, shown = rest.rpartition("@")
    if not separator or "?" in user:
        return "the URL"
    return f"{scheme}://{shown.partition('?')[0]}"
