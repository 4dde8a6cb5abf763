"""The gate of one simulated router: the real admission, with events where `router/flow_control/controller.py` has coroutines."""

from collections.abc import Callable

from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.request import Request
from router.flow_control.controller import LOOK_PERIOD_S, Admission
from router.flow_control.slo_admission import FlowItem, Refusal, Ticket, TicketState
from router.lifecycle.capacity_queue import MAX_TRYING
from router.lifecycle.placement import MIN_RETRY_GAP_S, RETRY_PERIOD_S


class SimulatedAdmission:
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

    def ask(self, request: Request, applicant: Callable[[], FlowItem]) -> None:
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


# Requests that found no room on any decode worker, and who of them tries again, as in `router/lifecycle/capacity_queue.py` and
# `router/lifecycle/placement.py`.


class SimulatedQueue:
    """`attempt` is called with the first ones whenever there may be room; it answers with `left` or `failed`."""

    def __init__(self, events: EventQueue, attempt: Callable[[Request], None]) -> None:
        self._events, self._attempt = events, attempt
        self._line: list[Request] = []
        self._trying: set[Request] = set()
        self._num_trying = 1
        self._may_try_at = 0.0
        self._version = 0

    def __len__(self) -> int:
        return len(self._line)

    def join(self, request: Request) -> None:
        """It waits behind the others. Alone, it has just tried in vain."""
        request.waits_since = self._events.now
        self._line.append(request)
        if len(self._line) == 1:
            self.failed(request)
        elif len(self._trying) < self._num_trying:
            self.opened()

    def join_first(self, request: Request) -> None:
        """Its output is under way: it goes before the others."""
        request.waits_since = self._events.now
        self._line.insert(0, request)
        if len(self._trying) < self._num_trying:
            self.opened()

    def is_trying(self, request: Request) -> bool:
        """Is an attempt of it under way?"""
        return request in self._trying

    def opened(self) -> None:
        """Somebody reported or ended."""
        if self._line and len(self._trying) < self._num_trying:
            self._try_at(max(self._events.now, self._may_try_at))

    def failed(self, request: Request) -> None:
        """Its attempt found no room."""
        self._trying.discard(request)
        self._num_trying = 1
        self._may_try_at = self._events.now + MIN_RETRY_GAP_S
        self._try_at(self._events.now + RETRY_PERIOD_S)

    def left(self, request: Request, *, placed: bool = True) -> None:
        """It has found a place, or has given up."""
        if placed and self._line[0] is request:
            self._num_trying = min(MAX_TRYING, 2 * self._num_trying)
        self._line.remove(request)
        self._trying.discard(request)
        if self._line:
            self._try_at(self._events.now)
        else:
            self._num_trying = 1

    def _try_at(self, at_s: float) -> None:
        self._version += 1
        self._events.at(at_s, self._try, self._version)

    def _try(self, version: int) -> None:
        if version != self._version:
            return
        for place, request in enumerate(self._line[: self._num_trying]):
            if place < self._num_trying and request not in self._trying:  # the one before may have failed at once
                self._trying.add(request)
                self._attempt(request)
