"""The KV events of one worker, as it starts and stops them; nothing of this runs unless the settings ask for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING

from pdmesh.runtime.errors import Unavailable
from pdmesh.worker.engines.base import WorkerEngine
from pdmesh.worker.kv_events.feed import BlockFeed
from pdmesh.worker.kv_events.settings import KVEventSettings

if TYPE_CHECKING:
    from pdmesh.worker.kv_events.publisher import ZmqPublisher

logger = logging.getLogger(__name__)


class KVEvents:
    """Own the feed, which is None where it is not wanted, and the publisher over ZMQ."""

    def __init__(self, settings: KVEventSettings, engine: WorkerEngine, plain_root: bytes) -> None:
        """Have the engine keep token ids, if they are wanted. Call it before the engine's `open`. `plain_root`: the root of
        blocks without tenant and salt."""
        self.feed = BlockFeed(engine.block_events()) if settings.is_wanted else None
        self.publisher: ZmqPublisher | None = None
        self._settings = settings
        self._plain_root = plain_root

    def open(self) -> None:
        """Open the publisher, if one is wanted. Raises ConfigError."""
        if not self._settings.kv_events_endpoint:
            return
        from pdmesh.worker.kv_events.publisher import ZmqPublisher  # has a thread, which others do without

        self.publisher = ZmqPublisher(self._settings, self._plain_root)
        logger.info("KV events are published at %s", self.publisher.endpoint)
        if "*" in self._settings.kv_events_endpoint or "tcp://0.0.0.0" in self._settings.kv_events_endpoint:
            logger.warning(
                "everybody who reaches %s can read the token ids of prompts: ZMQ asks for no key; see docs/kv_events.md",
                self.publisher.endpoint,
            )

    def work(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what runs until it is cancelled."""
        if self.feed is not None:
            yield self.feed.run()
            if self.publisher is not None:
                yield _publish(self.publisher, self.feed)

    def close(self) -> None:
        """End the streams of all readers; idempotent."""
        if self.feed is not None:
            self.feed.close()


async def _publish(publisher: ZmqPublisher, feed: BlockFeed) -> None:
    with contextlib.suppress(Unavailable):  # the engine has stopped, and says why itself
        await publisher.run(feed)
