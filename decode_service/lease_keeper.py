"""Ends what ran out of time: deadlines, leases, routers that stay away. One tick looks at everything; time is passed in."""

from __future__ import annotations

import asyncio
import time

from decode_service.deadlines import has_passed
from decode_service.ports import start
from decode_service.refusals import released_by_worker
from decode_service.request import Record
from decode_service.requests import Reservations
from decode_service.token_stream import Outboxes
from kvtransfer.reservation import Cancelled, Event, LeaseExpired
from pdmesh.runtime.errors import DeadlineExceeded, MeshError

TICK_S = 0.02


class LeaseKeeper:
    """Drives the clocks of the decode service."""

    def __init__(self, reservations: Reservations, outboxes: Outboxes) -> None:
        self._reservations = reservations
        self._outboxes = outboxes
        self.num_expired = 0  # leases

    async def run(self) -> None:
        """Ticks until cancelled."""
        while True:
            self.tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    def tick(self, now: float) -> None:
        for record in self._outboxes.tick(now):
            self._end(record, Cancelled(f"router {record.outbox.router_id} is gone"), None)
        for record in self._reservations.active:
            if has_passed(record.submission.deadline, now):
                self._end(record, Cancelled("deadline exceeded"), DeadlineExceeded("the request's deadline has passed"))
            elif has_passed(record.reservation.lease_deadline, now):
                self._end(record, LeaseExpired(), released_by_worker("its lease expired without progress"))
        self._reservations.sweep(now)

    def _end(self, record: Record, event: Event, failure: MeshError | None) -> None:
        """Once at a time for each record: ending waits for writers and for the engine, longer than a tick."""
        if not record.is_ending and not record.is_released:
            self.num_expired += isinstance(event, LeaseExpired)
            record.is_ending = True
            start(self._reservations.end(record, event, failure)).add_done_callback(lambda _: _ended(record))


def _ended(record: Record) -> None:
    record.is_ending = False
