"""Admission for coroutines: waits for the place that `router.admission` decides on."""

import asyncio

from router.admission import Admission, Refusal, Ticket, TicketState
from runtime.errors import MeshError, ResourceExhausted


class Gate:
    """One admission and those who wait at it."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def enter(self, priority: int) -> Ticket:
        """A ticket that holds a place; to be given back with `leave`. Raises ResourceExhausted with a retry delay."""
        loop = asyncio.get_running_loop()
        ticket = self.admission.ask(priority, loop.time())
        if isinstance(ticket, Refusal):
            raise ResourceExhausted(ticket.reason, retry_delay_s=ticket.retry_delay_s)
        if ticket.state is TicketState.WAITING:
            await self._wait(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give the place back, as often as one likes; wakes those who get one instead."""
        for admitted in self.admission.release(ticket, asyncio.get_running_loop().time()):
            waiter = self._waiting.pop(admitted.arrival, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def close(self, error: MeshError) -> None:
        """Turn away all who wait; those who hold a place keep it."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)

    async def _wait(self, ticket: Ticket) -> None:
        waiter = self._waiting[ticket.arrival] = asyncio.get_running_loop().create_future()
        try:
            await waiter
        except (asyncio.CancelledError, MeshError):
            self._waiting.pop(ticket.arrival, None)
            self.leave(ticket)  # it may have been admitted in the same moment
            raise
