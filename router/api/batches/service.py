"""The batches of one router: it takes up those that no other router works, and goes on with those of routers that have ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from router.api.batches.lines import LineLimits
from router.api.batches.records import BatchRecord
from router.api.batches.runner import LineRunner
from router.api.batches.store import Store, now_s
from router.api.batches.work import BatchWork
from router.config import BatchConfig

POLL_S = 1.0
SWEEP_S = 3600.0
CANCEL_S = 5.0

logger = logging.getLogger(__name__)


class Batches:
    """Work batches, from `start` to `stop`. Several routers may share a folder: each batch is worked by one of them."""

    def __init__(self, config: BatchConfig, max_body_bytes: int, runner: LineRunner) -> None:
        """Take the folder of `config`, which is opened by `start`."""
        self.config = config
        self.store = Store(config.http_batch_folder)
        self.runner = runner
        self.limits = LineLimits(max_body_bytes, config.http_batch_lines)
        self._works: dict[str, BatchWork] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: set[str] = set()
        self._woken = asyncio.Event()
        self._followers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open the folder, and look for work. Raises ConfigError."""
        await asyncio.to_thread(self.store.open)
        self._followers = [
            asyncio.create_task(self._follow(), name="batches"),
            asyncio.create_task(self._sweep(), name="sweep batches"),
        ]

    async def stop(self, grace_s: float) -> None:
        """Begin no more lines, give those that run `grace_s` seconds, and leave the rest to the next router."""
        for follower in self._followers:
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        for work in self._works.values():
            work.stop()
        for timeout_s in (grace_s, CANCEL_S):
            if not self._tasks:
                return
            await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in self._tasks:
                task.cancel()

    def wake(self, batch_id: str = "") -> None:
        """Look for work at once. `batch_id`: what is known of this batch has changed."""
        if batch_id in self._works:
            self._works[batch_id].wake()
        self._woken.set()

    def latest(self, record: BatchRecord) -> BatchRecord:
        """Return the state of a batch, of which this router may know more than the folder."""
        work = self._works.get(record.id)
        return record if work is None else self.store.seen(work.record)

    async def _follow(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._take_up(await asyncio.to_thread(lambda: list(self.store.unfinished(None, self._ended))))
            except OSError as error:
                logger.error("the batch folder cannot be read: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()

    async def _take_up(self, unfinished: Sequence[BatchRecord]) -> None:
        """Begin work: first of tenants of which the fewest batches run here, then of the oldest batch."""
        waiting = [record for record in unfinished if record.id not in self._works]
        while waiting:
            running = Counter(work.record.tenant for work in self._works.values())
            record = min(waiting, key=lambda each: (not self._is_to_end(each), running[each.tenant], each.id))
            waiting.remove(record)
            if len(self._works) < self.config.http_batch_running or self._is_to_end(record):
                await self._begin(record)

    def _is_to_end(self, record: BatchRecord) -> bool:
        """Return whether little is left to do: the batch is cancelled or expired."""
        return record.status == "cancelling" or record.expires_at <= now_s()

    async def _begin(self, record: BatchRecord) -> None:
        lock = await asyncio.to_thread(self.store.lock, record)
        if lock is None:
            return
        try:
            latest = await asyncio.to_thread(self.store.batch, record.tenant, record.id)
        except BaseException:
            os.close(lock)
            raise
        if latest.has_ended:
            os.close(lock)
            return
        work = BatchWork(latest, self.store, self.runner, self.config, self.limits)
        self._works[record.id] = work
        task = asyncio.create_task(self._work(work, lock), name=f"batch {record.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, work: BatchWork, lock: int) -> None:
        batch_id = work.record.id
        logger.info("batch %s: begins (%s)", batch_id, work.record.status)
        try:
            await work.run()
        except Exception:
            logger.exception("batch %s: the work on it failed; it goes on when a router starts anew", batch_id)
            self._ended.add(batch_id)
        finally:
            os.close(lock)
            del self._works[batch_id]
            self._woken.set()
        logger.info("batch %s: %s", batch_id, work.record.status)

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.store.sweep, now_s())
            except OSError as error:
                logger.error("the batch folder cannot be swept: %s", error)
            await asyncio.sleep(SWEEP_S)
