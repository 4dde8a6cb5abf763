"""Following all workers of a fleet by a call to each, which is made again whenever it ends: the loop, and its delays.

look ──► a new worker ──► call ──► it broke ──► a delay, longer each time ──► call ...
   └───► a lost one: the follower ends its calls
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from router.fleet.heartbeat import being_cancelled
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.routing.worker_snapshot import WorkerKey

LOOK_PERIOD_S = 0.1
"""The least time between two looks at the fleet: heartbeats come often."""


class InvalidMessage(ValueError):
    """Report an invalid message of a followed worker; the text names the field."""


@dataclass(frozen=True)
class CallEnd:
    """Hold why a call has ended: `problem` in words, None if it ended well; `code` where the worker or the network said it.
    `is_invalid`: the worker's message was. `bug`: an exception that no worker should cause."""

    problem: str | None = None
    code: grpc.StatusCode | None = None
    is_invalid: bool = False
    bug: Exception | None = None


class Gap:
    """Hold the delay before a worker's next call. It doubles with each call, until `reset`."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self.seconds = 0.0
        self._first_s, self._most_s = first_s, most_s

    def reset(self, *, to_first: bool = False) -> None:
        """Make the next call at once, or after the first delay: the one before has gone well."""
        self.seconds = self._first_s if to_first else 0.0

    def at_least_first(self) -> None:
        """Make the next call after the first delay, or a longer one that is due already."""
        self.seconds = max(self.seconds, self._first_s)

    async def wait(self) -> None:
        """Wait for the delay, with jitter, and double it."""
        await asyncio.sleep(self.seconds * random.uniform(0.5, 1.0))
        self.seconds = min(max(self._first_s, 2 * self.seconds), self._most_s)


async def call_again_while(
    goes_on: Callable[[], bool], call: Callable[[], Awaitable[None]], ended: Callable[[CallEnd], None], gap: Gap
) -> None:
    """Make a call while `goes_on`, with delays between; `ended` is told of each end. Whatever breaks costs one try."""
    while goes_on():
        await gap.wait()
        ended(await _end_of(call()))


async def _end_of(call: Awaitable[None]) -> CallEnd:
    """Wait for a call. Raises CancelledError only if this task is cancelled."""
    try:
        await call
    except InvalidMessage as error:
        return CallEnd(str(error), is_invalid=True)
    except grpc.aio.AioRpcError as error:
        return CallEnd(error.details() or error.code().name, error.code())
    except (asyncio.CancelledError, grpc.aio.UsageError) as error:
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        return CallEnd("its channel was closed")
    except Exception as error:  # noqa: BLE001  it costs this worker one try, and is logged by the caller
        return CallEnd("an internal error", bug=error)
    return CallEnd()


def alive_workers(fleet: FleetRegistry) -> dict[WorkerKey, Worker]:
    """Return the workers that live, by their incarnations."""
    workers = fleet.workers.values()
    return {(worker.address, worker.current.info.epoch): worker for worker in workers if worker.current is not None}


async def look_forever(fleet: FleetRegistry, look: Callable[[], None], logger: logging.Logger, what: str) -> None:
    """Call `look` now and after changes of the fleet, until cancelled. `what` it looks for, in words."""
    while True:
        change = fleet.changes.next
        try:
            look()
        except Exception:  # a bug here costs what is followed, and must not cost more
            logger.exception("looking for %s failed", what)
        await asyncio.sleep(LOOK_PERIOD_S)
        await change.wait()
