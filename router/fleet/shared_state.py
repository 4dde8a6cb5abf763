"""Shared state of the routers of a mesh: through Redis each tells the others what it has sent to workers and what tenants ask of
it.

It is soft state. Each router publishes at least every `PERIOD_S`, and `BURST_S` after it has sent something; all subscribe.
Nothing is stored in Redis, nothing has to be cleaned up after a router, and nothing waits for a message: without Redis each
router goes by its own counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.redis_link import MAX_BACKOFF_S, RedisLink, open_redis
from router.fleet import peers
from router.fleet.peers import PeerMessage, Peers, UnreadableMessage
from router.fleet.registry import FleetRegistry

PERIOD_S = 0.1
BURST_S = 0.02
TIMEOUT_S = 0.5
FIRST_BACKOFF_S = 0.1

logger = logging.getLogger(__name__)
Demand = Callable[[float], Mapping[str, float]]


class SharedState:
    """Publish and receive for one router, from `start` to `stop`."""

    def __init__(self, url: str, mesh: str, router_id: str, fleet: FleetRegistry, demand: Demand) -> None:
        """Create it. `demand`: returns tokens per second by tenant, at monotonic seconds. Raises ConfigError for a
        malformed URL."""
        self._channel = f"pdmesh:{records.check_id('mesh', mesh)}:routers"
        self._url = url
        self._link = RedisLink(url, timeout_s=TIMEOUT_S)
        self._router_id = router_id
        self._run = secrets.randbits(63)
        self._fleet = fleet
        self._demand = demand
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._has_foreign = False
        self.peers = Peers(router_id, self._run, time.monotonic())
        self.num_received = 0
        self.num_unreadable = 0

    def start(self) -> None:
        """Begin to publish and to listen."""
        self._fleet.on_dispatch = self._wake.set
        self._tasks = [
            asyncio.create_task(self._publish_forever(), name="tell routers"),
            asyncio.create_task(self._listen_forever(), name="hear routers"),
        ]

    async def stop(self) -> None:
        """Stop; the other routers notice within a second."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    def share(self, tenant: str) -> float:
        """Return this router's part of the tenant's limits."""
        return self.peers.share(tenant, time.monotonic())

    def received(self, data: bytes) -> None:
        """Take in a message of any router, this one included."""
        now = time.monotonic()
        try:
            message = peers.decode(data, now)
        except UnreadableMessage as error:
            self.num_unreadable += 1
            logger.debug("unreadable message of a router: %s", error)
            return
        self.num_received += 1
        self.peers.received(message, now)
        if message.router_id != self._router_id:
            self._count(now)

    def _count(self, now: float) -> None:
        """Update the workers' snapshots with what the other routers have sent."""
        sent = self.peers.sent(now)
        if not sent and not self._has_foreign:
            return
        self._has_foreign = bool(sent)
        for worker in self._fleet.workers.values():
            current = worker.current
            key = None if current is None else (worker.address, current.info.epoch)
            worker.received(sent.get(key, []) if key is not None else [])

    async def _publish_forever(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._publish_once()
                backoff_s = FIRST_BACKOFF_S
            except Exception:  # a router that is silent while it works would give out limits twice
                logger.exception("telling the other routers failed")
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _publish_once(self) -> None:
        """Publish once, and wait until there is something new to publish."""
        self._wake.clear()
        await self._publish()
        now = time.monotonic()
        self.peers.tick(now)
        self._count(now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S):
                await self._wake.wait()
            await asyncio.sleep(BURST_S)  # one message carries all that is sent within this time

    async def _publish(self) -> None:
        now = time.monotonic()
        sent = {
            (worker.address, worker.current.info.epoch): worker.sent_lately(now)
            for worker in self._fleet.workers.values()
            if worker.current is not None
        }
        data = peers.encode(PeerMessage(self._router_id, self._run, sent, self._demand(now)), now)

        async def publish(redis: Redis) -> int:
            return int(await redis.publish(self._channel, data))

        await self._link.call(publish)

    async def _listen_forever(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            received_before = self.peers.receives_itself(time.monotonic())
            try:
                await self._listen()
            except (RedisError, OSError, TimeoutError, ValueError) as error:
                if received_before:
                    logger.warning("the other routers cannot be heard (%s); going by what this one knows", error)
            except Exception:  # the server that answers may not be a Redis
                logger.exception("listening to the other routers failed")
            backoff_s = FIRST_BACKOFF_S if received_before else min(2 * backoff_s, MAX_BACKOFF_S / 2)
            await asyncio.sleep(backoff_s)

    async def _listen(self) -> None:
        """Listen until the connection fails, or nothing comes: our own messages should."""
        redis = open_redis(self._url, TIMEOUT_S)
        try:
            async with redis.pubsub(ignore_subscribe_messages=True) as subscription:
                await subscription.subscribe(self._channel)
                async for message in subscription.listen():
                    if isinstance(message["data"], bytes):
                        self.received(message["data"])
        finally:
            async with asyncio.timeout(TIMEOUT_S):
                await redis.aclose()
