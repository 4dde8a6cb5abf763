"""For transports over which a part goes from the pool of one device to that of another: each end sums on its own (word_sum)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import grpc

from kvtransfer.errors import FrameError, TransferRefused, push_failed
from kvtransfer.manifest import Part
from kvtransfer.memory import KVMemory
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import Stream
from kvtransfer.waiting import all_ended
from pdmesh.v1 import transfer_pb2

if TYPE_CHECKING:  # whoever moves KV of CPU memory needs no torch
    from pdmesh.engine.kv_cache.ipc_pool import ShownPool
    from pdmesh.engine.kv_cache.streams import Mark

ALIVE_S = 0.5  # between two signs of life while the device computes

logger = logging.getLogger(__name__)


class SummedOutgoing:
    """The sender's end, but for its hello. A part is announced with its sum when the device has computed both."""

    def __init__(self, stream: Stream, shown: ShownPool, transport: str) -> None:
        self.stream = stream
        self._shown = shown
        self._transport = transport
        self._sum = 0

    async def settle(
        self, layers: range, block_ids: Sequence[int], after: Mark, say_alive: Callable[[], Awaitable[None]]
    ) -> None:
        summing = self._shown.sum(layers, block_ids, after)
        waiting = asyncio.wrap_future(summing)
        try:
            while not (await asyncio.wait([waiting], timeout=ALIVE_S))[0]:
                await say_alive()
        finally:
            await all_ended([summing])
        if (error := waiting.exception()) is not None:
            problem = f"{self._transport}: our device could not sum a part: {error}"
            raise push_failed(grpc.StatusCode.UNIMPLEMENTED, problem) from error
        self._sum = waiting.result()

    async def send_part(
        self,
        header: transfer_pb2.PartHeader,
        views: Sequence[memoryview],
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        header.source_block_ids[:] = block_ids
        await self.stream.write_message(transfer_pb2.TransferMessage(part=header))
        return self._sum


class SummedIncoming:
    """The receiver's end, in so far as its parts come in one way only."""

    async def receive_part(
        self,
        header: transfer_pb2.PartHeader,
        part: Part,
        memory: KVMemory,
        block_ids: Sequence[int],
        on_bytes: Callable[[int], None],
    ) -> int:
        raise FrameError("over this transport parts are pulled into the pool of a device, and nowhere else")


async def pulled(pull: Callable[[], Future[int]]) -> int:
    """The sum of what our device stores; whoever is cancelled returns when it is through. Raises TransferRefused."""
    try:
        pulling = pull()
        await all_ended([pulling])
        return pulling.result()
    except (RuntimeError, ValueError) as error:
        logger.warning("the device could not read a part of another worker's pool: %s", error)
        raise unusable("part", f"the device could not read it: {error}") from error


def shown_by(memory: KVMemory) -> ShownPool | None:
    """The pool as other processes may read it, if they may."""
    return memory.shown if isinstance(memory, StagedMemory) else None


def unusable(field: str, what: str) -> TransferRefused:
    """This transport will not do; the sender takes another."""
    return TransferRefused(grpc.StatusCode.UNIMPLEMENTED, what, field=field)
