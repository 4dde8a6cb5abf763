"""Runs an open loop: each session starts when it is due; only the next turn of a conversation waits for an answer.

Latencies count from when a request was due. The load test's own lateness is measured: it is part of the latencies, and beyond a
bound the result no longer describes the target (`RunLog.lateness_s`, `loop_lag_s`).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome, Record
from pdmesh.loadtest.targets.target import Answer, Ask, Done, Fleet, Said, Target, TargetError, Tokens
from pdmesh.loadtest.workload import PlannedSession, PlannedTurn

_LAG_PERIOD_S = 0.02
_FLEET_PERIOD_S = 1.0
_MAX_BURST = 32


@dataclass(frozen=True)
class RunSettings:
    """Configure a run. `timeout_s` counts from when a request is due. After `stop_turns_s` seconds of a run no conversation
    continues; after `give_up_s` running requests have timed out. `seed` makes the words of prompts: with a new one, the target
    has none of them in its caches. Requests carry the objectives that `book` has for their class."""

    timeout_s: float = 60.0
    max_concurrency: int = 10_000
    stop_turns_s: float = float("inf")
    give_up_s: float = float("inf")
    request_id_prefix: str = "loadtest"
    seed: int = 0
    book: ObjectiveBook = field(default_factory=lambda: ObjectiveBook(Objectives()))


@dataclass
class RunLog:
    """Hold the log of a run. `started_at` is a reading of the event loop's clock; all other times count from it, in seconds."""

    started_at: float = 0.0
    records: list[Record] = field(default_factory=list)
    # Lateness of this process's timers: the delay by which any message may have been seen late.
    loop_lag_s: array[float] = field(default_factory=lambda: array("d"))
    fleet: list[tuple[float, Fleet]] = field(default_factory=list)
    num_running: int = 0
    interrupted: bool = False


class _Call:
    """Hold what has arrived of a running request."""

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self.times = array("d")
        self.num_tokens = 0
        self.ids: list[int] = []
        self.text: list[str] = []
        self.done = Done()

    @property
    def answer(self) -> Answer:
        return Answer(self.ids, "".join(self.text))

    def add(self, tokens: Tokens, now_s: float) -> None:
        self.times.append(now_s)
        self.num_tokens += tokens.count
        self.ids += tokens.token_ids
        self.text.append(tokens.text)


class Runner:
    """Run a plan against a target. `log` may be read while it runs; `on_record` receives each record as it is made."""

    def __init__(self, target: Target, settings: RunSettings, on_record: Callable[[Record], None] | None = None) -> None:
        self.log = RunLog()
        self._target = target
        self._settings = settings
        self._on_record = on_record
        self._clock = asyncio.get_running_loop().time

    async def run(self, sessions: Iterable[PlannedSession]) -> RunLog:
        """Start every session when it is due and wait for all of them. Cancelling it (Ctrl-C) ends running requests, as ABORTED;
        the log of finished ones stays readable."""
        self.log.started_at = self._clock()
        async with self._background():
            try:
                async with asyncio.TaskGroup() as group:
                    await self._start_all(sessions, group)
            except asyncio.CancelledError:
                self.log.interrupted = True
                raise
        return self.log

    def now_s(self) -> float:
        """Return the seconds since the start of the run."""
        return self._clock() - self.log.started_at

    async def _start_all(self, sessions: Iterable[PlannedSession], group: asyncio.TaskGroup) -> None:
        behind = 0
        for session in sessions:
            # Ahead of time, so that a long prompt does not make its own request late.
            ask = self._ask(session, 0, (Said(session.turns[0].segments),))
            prepared = self._target.prepare(ask)
            early_s = session.at_s - self.now_s()
            behind = 0 if early_s > 0 else behind + 1
            # Overdue sessions start before the loop yields to others, but not without bound.
            if early_s > 0 or behind % _MAX_BURST == 0:
                await asyncio.sleep(max(0.0, early_s))
            group.create_task(self._session(session, ask, prepared))

    async def _session(self, session: PlannedSession, ask: Ask, prepared: object) -> None:
        scheduled_s = session.at_s
        said: tuple[Said, ...] = ()
        for number, turn in enumerate(session.turns):
            if number:
                scheduled_s = self.now_s() + turn.think_s
                if scheduled_s > self._settings.stop_turns_s:
                    return
                ask = self._ask(session, number, (*said, Said(turn.segments)))
                prepared = self._target.prepare(ask)
                await asyncio.sleep(max(0.0, scheduled_s - self.now_s()))
            call = _Call(self.now_s())
            try:
                outcome, error = await self._request(turn, prepared, scheduled_s, call)
            except asyncio.CancelledError:
                self._keep(_record(session, number, ask, scheduled_s, call, self.now_s(), Outcome.ABORTED, ""))
                raise
            self._keep(_record(session, number, ask, scheduled_s, call, self.now_s(), outcome, error))
            if outcome is not Outcome.OK:
                return
            said = (*said, Said(turn.segments, call.answer))

    def _ask(self, session: PlannedSession, number: int, said: tuple[Said, ...]) -> Ask:
        settings, traffic = self._settings, session.traffic
        return Ask(
            request_id=f"{settings.request_id_prefix}-{session.index}-{number}",
            seed=settings.seed,
            traffic=traffic,
            said=said,
            output_tokens=session.turns[number].output_tokens,
            timeout_s=settings.timeout_s,
            objectives=settings.book.of(traffic.name),
        )

    async def _request(self, turn: PlannedTurn, prepared: object, scheduled_s: float, call: _Call) -> tuple[Outcome, str]:
        """Send one request and wait for its end. Return how it ended and, unless that was planned, why."""
        log, settings = self.log, self._settings
        if log.num_running >= settings.max_concurrency:
            return Outcome.NOT_SENT, f"{settings.max_concurrency} requests were running already"
        timeout_s = min(settings.timeout_s, settings.give_up_s - scheduled_s)
        waited_s = timeout_s if turn.cancel_after_s is None else min(turn.cancel_after_s, timeout_s)
        log.num_running += 1
        try:
            async with asyncio.timeout_at(log.started_at + scheduled_s + waited_s):
                await self._receive(prepared, call)
        except TimeoutError:
            if waited_s < timeout_s:
                return Outcome.CANCELLED, ""
            return Outcome.TIMEOUT, "no complete answer within the load test's timeout"
        except TargetError as error:
            return error.outcome, error.message
        finally:
            log.num_running -= 1
        return (Outcome.OK, "") if call.times else (Outcome.ERROR, "the answer held no token")

    async def _receive(self, prepared: object, call: _Call) -> None:
        clock, started_at = self._clock, self.log.started_at
        async with aclosing(self._target.stream(prepared)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    call.add(event, clock() - started_at)
                else:
                    call.done = event

    def _keep(self, record: Record) -> None:
        self.log.records.append(record)
        if self._on_record is not None:
            self._on_record(record)

    @asynccontextmanager
    async def _background(self) -> AsyncIterator[None]:
        """Measure the event loop's own lag and poll the fleet, for as long as the run lasts."""
        tasks = [asyncio.create_task(self._watch_lag()), asyncio.create_task(self._watch_fleet())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_lag(self) -> None:
        while True:
            due = self._clock() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self.log.loop_lag_s.append(self._clock() - due)

    async def _watch_fleet(self) -> None:
        while True:
            # A busy router may miss one poll; the next may be answered.
            with suppress(TargetError):
                fleet = await self._target.fleet()
                if fleet is None:
                    return
                self.log.fleet.append((self.now_s(), fleet))
            await asyncio.sleep(_FLEET_PERIOD_S)


def _record(
    session: PlannedSession, turn: int, ask: Ask, scheduled_s: float, call: _Call, end_s: float, outcome: Outcome, error: str
) -> Record:
    traffic, done = session.traffic, call.done
    return Record(
        session=session.index,
        turn=turn,
        traffic_class=traffic.name,
        tenant=traffic.tenant,
        priority=traffic.priority,
        scheduled_s=scheduled_s,
        sent_s=call.sent_s,
        end_s=end_s,
        outcome=outcome,
        input_tokens=ask.num_input_tokens if done.input_tokens is None else done.input_tokens,
        output_tokens=call.num_tokens if done.output_tokens is None else done.output_tokens,
        cached_tokens=done.cached_tokens,
        token_times=call.times,
        error=error,
        phases_ms=done.phases_ms,
        workers=done.workers,
    )
