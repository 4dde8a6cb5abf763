"""The gate of one simulated router: the real admission, with events where `router/gate.py` has coroutines."""

from collections.abc import Callable

from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.request import Request
from router.flow_control.controller import Admission
from router.flow_control.gate import LOOK_PERIOD_S
from router.flow_control.types import Applicant, Refusal, Ticket, TicketState


class Gate:
    """`admitted` and `refused` are called with each request exactly once, of those that `ask`. Without an admission all go in."""

    def __init__(
        self,
        events: EventQueue,
        admission: Admission | None,
        admitted: Callable[[Request], None],
        refused: Callable[[Request, str], None],
    ) -> None:
        self._events, self._admission, self._admitted, self._refused = events, admission, admitted, refused
        self._waiting: dict[int, Request] = {}
        self._looks = False

    @property
    def num_waiting(self) -> int:
        """Requests that it holds."""
        return len(self._waiting)

    def ask(self, request: Request, applicant: Callable[[], Applicant]) -> None:
        """May it go in?"""
        if self._admission is None:
            self._admitted(request)
            return
        answer = self._admission.ask(applicant(), self._events.now)
        decided = self._admission.decided()
        if isinstance(answer, Refusal):
            self._refused(request, answer.reason)
        else:
            self._enter(request, answer)
        self._wake(decided)

    def placed(self, request: Request) -> None:
        """It has been sent to a worker."""
        if self._admission is not None and request.ticket is not None:
            self._wake(self._admission.placed(request.ticket, self._events.now))

    def leave(self, request: Request, used_tokens: int) -> None:
        """It has ended; its tenant pays for so many."""
        ticket, request.ticket = request.ticket, None
        if self._admission is not None and ticket is not None:
            self._wake(self._admission.release(ticket, self._events.now, used_tokens))

    def answered(self, request: Request) -> None:
        """Its first token came smoothly: was its forecast right?"""
        if self._admission is not None and request.ticket is not None and request.first_at is not None:
            self._admission.answered(request.ticket, request.first_at)

    def _enter(self, request: Request, ticket: Ticket) -> None:
        request.ticket = ticket
        if ticket.state is TicketState.WAITING:
            self._waiting[ticket.number] = request
            self._look_later()
        else:
            self._admitted(request)

    def _wake(self, decided: list[Ticket]) -> None:
        """By events, as who is admitted may be placed at once, and ask again."""
        for ticket in decided:
            request = self._waiting.pop(ticket.number, None)
            if request is not None:
                self._events.after(0.0, self._decided, request, ticket)

    def _decided(self, request: Request, ticket: Ticket) -> None:
        if ticket.refusal is None:
            self._admitted(request)
        else:
            request.ticket = None
            self._refused(request, ticket.refusal.reason)

    def _look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._events.after(LOOK_PERIOD_S, self._look)

    def _look(self) -> None:
        self._looks = False
        if self._admission is not None and self._waiting:
            self._wake(self._admission.look(self._events.now))
            if self._waiting:
                self._look_later()
