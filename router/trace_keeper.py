"""Tells workers which traces are wanted although they were not sampled; a few at a time, soon, and once."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import grpc.aio

from router.background import Background

if TYPE_CHECKING:
    from router.fleet.worker import Worker

GATHER_S = 0.2
CALL_TIMEOUT_S = 1.0
MAX_IDS = 512

logger = logging.getLogger(__name__)


class TraceKeeper:
    """What is lost on the way is lost: a trace without a worker's part says as much by itself."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._wanted: dict[Worker, list[int]] = defaultdict(list)
        self._is_gathering = False

    def keep(self, trace_id: int, workers: Iterable[Worker]) -> None:
        """These workers hold a part of the trace."""
        for worker in workers:
            if len(self._wanted[worker]) < MAX_IDS:
                self._wanted[worker].append(trace_id)
        if self._wanted and not self._is_gathering:
            self._is_gathering = True
            self._background.spawn(self._tell_all(), "keep traces")

    async def _tell_all(self) -> None:
        await asyncio.sleep(GATHER_S)
        self._is_gathering = False
        wanted, self._wanted = self._wanted, defaultdict(list)
        await asyncio.gather(*(_tell(worker, trace_ids) for worker, trace_ids in wanted.items()))


async def _tell(worker: Worker, trace_ids: list[int]) -> None:
    try:
        await worker.keep_traces(trace_ids, CALL_TIMEOUT_S)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
        logger.info("%s was not told of %d traces to keep: %s", worker.address, len(trace_ids), error)
