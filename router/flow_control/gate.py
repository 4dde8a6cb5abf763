"""Admission for coroutines: waits for the place that `router.admission` decides on."""

import asyncio

from pdmesh.runtime.errors import MeshError, ResourceExhausted
from router.flow_control.controller import Admission
from router.flow_control.types import Applicant, Refusal, Ticket, TicketState

LOOK_PERIOD_S = 0.02
"""While somebody waits, the mesh is looked at so often: reports, first tokens and time itself open the gate, too."""


class Gate:
    """One admission and those who wait at it."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next_look: asyncio.TimerHandle | None = None

    async def enter(self, applicant: Applicant) -> Ticket:
        """A ticket that holds a place; to be given back with `leave`. Raises ResourceExhausted with a retry delay."""
        ticket = self.admission.ask(applicant, asyncio.get_running_loop().time())
        self._wake(self.admission.decided())
        if isinstance(ticket, Refusal):
            raise _error(ticket)
        if ticket.state is TicketState.WAITING:
            await self._wait(ticket)
        return ticket

    def leave(self, ticket: Ticket, used_tokens: int | None = None) -> None:
        """Give the place back, as often as one likes; wakes those who get one instead. `used_tokens`: see Admission.release."""
        self._wake(self.admission.release(ticket, asyncio.get_running_loop().time(), used_tokens))

    def placed(self, ticket: Ticket) -> None:
        """It has been sent to a worker."""
        self._wake(self.admission.placed(ticket, asyncio.get_running_loop().time()))

    def close(self, error: MeshError) -> None:
        """Turn away all who wait; those who hold a place keep it."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)

    def _wake(self, decided: list[Ticket]) -> None:
        for ticket in decided:
            waiter = self._waiting.pop(ticket.number, None)
            if waiter is None or waiter.done():
                continue
            if ticket.refusal is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(_error(ticket.refusal))

    async def _wait(self, ticket: Ticket) -> None:
        waiter = self._waiting[ticket.number] = asyncio.get_running_loop().create_future()
        self._look_later()
        try:
            await waiter
        except (asyncio.CancelledError, MeshError):
            self._waiting.pop(ticket.number, None)
            self.leave(ticket)  # it may have been admitted in the same moment
            raise

    def _look_later(self) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_PERIOD_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        try:
            self._wake(self.admission.look(asyncio.get_running_loop().time()))
        finally:
            if self._waiting:
                self._look_later()


def _error(refusal: Refusal) -> ResourceExhausted:
    message = f"{refusal.reason}: {refusal.message}"
    return ResourceExhausted(message, retry_delay_s=refusal.retry_delay_s, reason=refusal.reason)
