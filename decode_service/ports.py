"""Tasks that survive the end of an RPC, and the settings of the decode service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

_tasks: set[asyncio.Task[Any]] = set()


async def in_own_task(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, even if the caller is cancelled while it waits for it."""
    return await asyncio.shield(start(work))


def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run `work` in a task, and log an error that no caller awaits."""
    task = asyncio.create_task(work)
    _tasks.add(task)  # the event loop keeps only weak references
    task.add_done_callback(_finished)
    return task


def _finished(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("%s ended with %r", task.get_coro(), error)


# Times of the decode service.


@dataclass(frozen=True)
class StreamSettings:
    """Hold the times of token streams, in seconds. The stream of a router that is silent for `stream_timeout_s` counts as broken;
    a router without a stream for `grace_s` counts as gone."""

    stream_timeout_s: float = 1.0
    grace_s: float = 2.0
    report_period_s: float = 0.2


@dataclass(frozen=True)
class ReservationSettings:
    """Hold the times of reservations, in seconds. Finished output is kept for `keep_output_s`, which is longer than a router may
    take to reattach."""

    lease_s: float = 5.0
    keep_output_s: float = 4.0
    retry_delay_s: float = 0.1


@dataclass(frozen=True)
class DecodeSettings:
    """Hold the times of the decode service, in seconds."""

    stream: StreamSettings = field(default_factory=StreamSettings)
    reservation: ReservationSettings = field(default_factory=ReservationSettings)
