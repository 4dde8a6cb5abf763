"""Flow control: which requests start now, which wait, and which are refused with a reason and a retry delay.

ask ──► Ticket(admitted)                                     a slot is free and the forecast is good
    ──► Ticket(waiting) ─┬► admitted                         by `release` or `look`: fair between tenants, then by rank
                         └► refused                          its objective can no longer be met, or it was evicted for another
    ──► Refusal(reason, message, retry_delay_s)              over its rate; too late by prediction; the queue is full

`Admission` is pure: no clock, no I/O, no tasks. What it knows of the mesh comes through `FlowItem.foresee`; without a forecast it
decides by counts alone. `FlowController` runs it on the event loop.
"""

import asyncio
import itertools

from pdmesh.runtime.errors import DeadlineExceeded, MeshError, ResourceExhausted
from router.flow_control.capacity import AdmissionSettings, InflightLimiter, SameForAll, Tally, TenantBook, TenantLimits
from router.flow_control.queue import DispatchOrder, Lane, RequestQueue
from router.flow_control.slo_admission import (
    FlowItem,
    Forecast,
    Refusal,
    Ticket,
    TicketState,
    Verdict,
    alone_s,
    expected_ttft_s,
    retry_delay_s,
)


class Admission:
    """Decide for one router. Every ticket is given back with `release`. `release` and `look` return the waiting tickets that were
    decided; after `ask` they are in `decided`."""

    def __init__(self, settings: AdmissionSettings, tenants: TenantBook | None = None) -> None:
        self.settings = settings
        self.limiter = InflightLimiter(settings.max_inflight, tenants or SameForAll())
        self._room = RequestQueue(settings.max_queued, settings.max_queued_bytes)
        self._dispatch_order = DispatchOrder(settings, self._room, self.limiter)
        self._numbers = itertools.count()

    @property
    def max_inflight(self) -> int:
        """Return the bound on admitted tickets."""
        return self.settings.max_inflight

    @property
    def max_queued(self) -> int:
        """Return the bound on waiting tickets."""
        return self.settings.max_queued

    @property
    def num_inflight(self) -> int:
        """Return the number of admitted tickets."""
        return self.limiter.num_inflight

    @property
    def num_queued(self) -> int:
        """Return the number of waiting tickets."""
        return self._room.num_queued

    @property
    def num_queued_bytes(self) -> int:
        """Return the bytes that waiting tickets hold."""
        return self._room.num_bytes

    def ask(self, item: FlowItem, now: float) -> Ticket | Refusal:
        """Return a ticket, which is admitted or waiting, or a refusal. `now`: monotonic seconds, as in all calls."""
        limits = self.limiter.tenants.limits_of(item.tenant)
        tally = self.limiter.counts.of(item.tenant, item.priority)
        answer = self._rate_refusal(item, limits, now) or self._place_or_queue(item, limits, tally, now)
        if isinstance(answer, Refusal):
            tally.refused[answer.reason] += 1
        return answer

    def release(self, ticket: Ticket, now: float, used_tokens: int | None = None) -> list[Ticket]:
        """Give a ticket back, in any state and any number of times; return the tickets that were decided meanwhile.

        `used_tokens`, prompt and output, replace the tokens that an admitted request was expected to take; None: they were right.
        """
        if ticket.state is TicketState.WAITING:
            self._room.remove(ticket)
            self.limiter.leave(ticket)
        elif ticket.state is TicketState.ADMITTED:
            self._release(ticket, now, ticket.item.cost if used_tokens is None else float(used_tokens))
            return self.look(now)
        return self.decided()

    def answered(self, ticket: Ticket, now: float) -> None:
        """Record that the request's first token has come: it shows how accurate forecasts are."""
        item, expected_s = ticket.item, ticket.expected_s
        if expected_s is not None and item.ttft_s is not None:
            accuracy = self._room.lane(item.lane, now).accuracy
            accuracy.observe(expected_s, now - ticket.arrived, item.ttft_s, now)

    def placed(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Record that the prompt has been sent to a worker, so that forecasts contain it from now on; return as `look`."""
        self._room.lane(ticket.item.lane, now).transit.leave(ticket.number)
        return self.look(now) if self.num_queued else []

    def look(self, now: float) -> list[Ticket]:
        """Look at the mesh again: admit the tickets that may start, refuse those that are too late; return both."""
        self._dispatch_order.take(now)
        for lane in self._room.lanes.values():
            lane.tick(now, is_full=self.limiter.is_full)
        return self.decided()

    def decided(self) -> list[Ticket]:
        """Return the tickets that were decided since the last call."""
        decided, self._dispatch_order.decided = self._dispatch_order.decided, []
        return decided

    def _release(self, ticket: Ticket, now: float, used_tokens: float) -> None:
        item = ticket.item
        lane = self._room.lane(item.lane, now)
        lane.drain.record(lane.tick(now, is_full=self.limiter.is_full), item.cost)
        lane.patience.moved(now)
        lane.transit.leave(ticket.number)
        lane.shares.settle(item.tenant, used_tokens - item.cost)
        self.limiter.release(ticket, used_tokens)

    def _rate_refusal(self, item: FlowItem, limits: TenantLimits, now: float) -> Refusal | None:
        delay_s = self.limiter.rates.delay_s(item.tenant, limits, item.cost, now)
        if not delay_s:
            return None
        message = (
            f"the tenant's rate of {limits.tokens_per_s:g} tokens/s (prompt and output, up to {limits.burst:g} at once) is used "
            f"up: this request takes about {item.cost:.0f}; retry in {delay_s:.1f} s"
        )
        return Refusal("rate", message, delay_s)

    def _place_or_queue(self, item: FlowItem, limits: TenantLimits, tally: Tally, now: float) -> Ticket | Refusal:
        lane, forecast = self._room.lane(item.lane, now), None
        lane.tick(now, is_full=self.limiter.is_full)
        if self._may_be_first(lane, item):
            forecast = item.foresee()
            refusal = self._dispatch_order.too_late(lane, item, forecast, None, now)
            if refusal is not None:
                return refusal
            if self._dispatch_order.way(lane, item, forecast, now) is Verdict.OPEN or not self.max_queued:
                return self._admit(lane, item, limits, forecast, tally, now)
        elif not self.limiter.is_full and self._dispatch_order.may_overtake(lane, item):
            forecast = item.foresee()
            if self._dispatch_order.overtakes(lane, item, forecast, now):
                return self._admit(lane, item, limits, forecast, tally, now)
        refusal = self._hopeless(lane, item, limits, now)
        if refusal is not None:
            return refusal
        return self._queue(lane, item, limits, forecast or item.foresee(), tally, now)

    def _may_be_first(self, lane: Lane, item: FlowItem) -> bool:
        if self.limiter.is_full or not lane.shares.is_first(item):
            return False
        return self.limiter.within_limit(item.tenant)

    def _admit(
        self, lane: Lane, item: FlowItem, limits: TenantLimits, forecast: Forecast | None, tally: Tally, now: float
    ) -> Ticket:
        ticket = Ticket(item, next(self._numbers), now)
        _note_expected(ticket, forecast, None)
        lane.transit.enter(ticket.number, 0.0 if forecast is None else alone_s(forecast), now)
        lane.shares.charge(item, limits.weight)
        lane.patience.progress(now)
        self.limiter.open(ticket, tally)
        self.limiter.admit(ticket)
        lane.tick(now, is_full=self.limiter.is_full)
        return ticket

    def _hopeless(self, lane: Lane, item: FlowItem, limits: TenantLimits, now: float) -> Refusal | None:
        """Return a refusal that needs no forecast, so that a flood of requests is cheap to refuse."""
        if not self._room.fits(item) and self._room.victim(item, limits.weight) is None:
            return self._full(lane)
        wait_s = lane.wait_s(lane.shares.cost_ahead(item, limits.weight))
        return lane.outlook(item).unless_waiting_alone(item, wait_s)

    def _queue(
        self, lane: Lane, item: FlowItem, limits: TenantLimits, forecast: Forecast | None, tally: Tally, now: float
    ) -> Ticket | Refusal:
        wait_s = lane.wait_s(lane.shares.cost_ahead(item, limits.weight))
        refusal = self._dispatch_order.too_late(lane, item, forecast, wait_s or 0.0, now)
        if refusal is not None:
            return refusal
        if not self._make_room(item, limits):
            return self._full(lane)
        ticket = Ticket(item, next(self._numbers), now)
        _note_expected(ticket, forecast, wait_s or 0.0)
        self._room.push(ticket, limits.weight, now)
        tally.num_waited += 1
        self.limiter.open(ticket, tally)
        self._dispatch_order.note_latest_start(ticket, forecast)
        lane.tick(now, is_full=self.limiter.is_full)
        return ticket

    def _make_room(self, item: FlowItem, limits: TenantLimits) -> bool:
        """Evict waiting tickets until the item fits; False: there is none that it may evict."""
        if self._room.fits(item):
            return True
        while True:
            victim = self._room.victim(item, limits.weight)
            if victim is None:
                return False
            for_rank = victim.item.rank > item.rank or victim.item.tenant == item.tenant
            favoured = "requests of higher priority" if for_rank else "tenants that hold less of it"
            message = f"the queue is full, and this request makes way for {favoured}; retry later"
            delay_s = self._full_delay_s(self._room.lanes[victim.item.lane])
            self._dispatch_order.refuse(victim, Refusal("priority" if for_rank else "share", message, delay_s))
            if self._room.holds(item):
                return True

    def _full(self, lane: Lane) -> Refusal:
        message = (
            f"the router is full: {self.num_inflight} requests in flight (max_inflight {self.max_inflight}), {self.num_queued} "
            f"waiting (max_queued {self.max_queued}), {self.num_queued_bytes} bytes of them "
            f"(max_queued_bytes {self.settings.max_queued_bytes}); retry later"
        )
        return Refusal("queue_full", message, self._full_delay_s(lane))

    def _full_delay_s(self, lane: Lane) -> float:
        return retry_delay_s(lane.drain.seconds_for(lane.cost, lane.clock.now))


def _note_expected(ticket: Ticket, forecast: Forecast | None, wait_s: float | None) -> None:
    if forecast is not None:
        ticket.expected_s = expected_ttft_s(forecast, wait_s)


# Flow control for coroutines: they wait for the decisions of `Admission`.

LOOK_PERIOD_S = 0.02
"""The period between looks at the mesh while requests wait: heartbeats, first tokens and time itself change the forecast, too."""


class FlowController:
    """Run one `Admission`, and wake the coroutines that wait for it."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next_look: asyncio.TimerHandle | None = None

    async def enter(self, item: FlowItem) -> Ticket:
        """Return an admitted ticket, to be given back with `leave`. Raises ResourceExhausted with a retry delay, and
        DeadlineExceeded where not even an idle mesh would meet the deadline."""
        ticket = self.admission.ask(item, asyncio.get_running_loop().time())
        self._wake(self.admission.decided())
        if isinstance(ticket, Refusal):
            raise _error(ticket)
        if ticket.state is TicketState.WAITING:
            await self._wait(ticket)
        return ticket

    def leave(self, ticket: Ticket, used_tokens: int | None = None) -> None:
        """Give the ticket back, any number of times, and wake requests that are admitted instead. `used_tokens`: see
        Admission.release."""
        self._wake(self.admission.release(ticket, asyncio.get_running_loop().time(), used_tokens))

    def placed(self, ticket: Ticket) -> None:
        """Record that the request has been sent to a worker."""
        self._wake(self.admission.placed(ticket, asyncio.get_running_loop().time()))

    def close(self, error: MeshError) -> None:
        """Fail all waiting requests; admitted ones keep their slots."""
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


def _error(refusal: Refusal) -> ResourceExhausted | DeadlineExceeded:
    message = f"{refusal.reason}: {refusal.message}"
    if refusal.retry_delay_s is None:
        return DeadlineExceeded(message, reason=refusal.reason)
    return ResourceExhausted(message, retry_delay_s=refusal.retry_delay_s, reason=refusal.reason)
