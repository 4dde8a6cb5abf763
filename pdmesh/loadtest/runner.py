"""Runs an open loop: each session starts when it is due; only the next turn of a conversation waits for an answer, also where a
trace says that it was due before (it is held, and its latencies count from when it was due).

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
from pdmesh.loadtest.sessions import PromptIndex
from pdmesh.loadtest.targets.target import Answer, Ask, Done, Fleet, Said, Target, TargetError, Tokens
from pdmesh.loadtest.workload import PlannedSession

_LAG_PERIOD_S = 0.02
_FLEET_PERIOD_S = 1.0
_MAX_BURST = 32


@dataclass(frozen=True)
class RunSettings:
    """Configure a run. `timeout_s` counts from when a request is due, or no longer held. After `stop_turns_s` seconds of a run no
    conversation continues; after `give_up_s` running requests have timed out. `seed` makes the words of prompts: with a new one,
    the target has none of them in its caches. Requests carry the objectives that `book` has for their class."""

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
        self.reusable_tokens = 0

    @property
    def answer(self) -> Answer:
        return Answer(self.ids, "".join(self.text), self.num_output_tokens)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens if self.done.output_tokens is None else self.done.output_tokens

    def add(self, tokens: Tokens, now_s: float) -> None:
        self.times.append(now_s)
        self.num_tokens += tokens.count
        self.ids += tokens.token_ids
        self.text.append(tokens.text)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Hold a turn that is to be sent at `due_s`. `ready_s`: when the turn before it had ended, if that was later."""

    session: PlannedSession
    number: int
    ask: Ask
    prepared: object
    due_s: float
    ready_s: float | None = None

    @property
    def start_s(self) -> float:
        return self.due_s if self.ready_s is None else self.ready_s

    @property
    def pieces(self) -> list[tuple[str, int]]:
        """Return the prompt, answers included, as pieces that a PromptIndex knows."""
        pieces = []
        for place, said in enumerate(self.ask.said):
            pieces += [(segment.key, segment.num_tokens) for segment in said.segments]
            if said.answer is not None:
                pieces.append(self.answer_piece(place, said.answer.num_tokens))
        return pieces

    def answer_piece(self, place: int, num_tokens: int) -> tuple[str, int]:
        return f"answer{self.session.index}.{place}", num_tokens


class Runner:
    """Run a plan against a target. `log` may be read while it runs; `on_record` receives each record as it is made."""

    def __init__(self, target: Target, settings: RunSettings, on_record: Callable[[Record], None] | None = None) -> None:
        self.log = RunLog()
        self._target = target
        self._settings = settings
        self._on_record = on_record
        self._clock = asyncio.get_running_loop().time
        self._sent = PromptIndex()

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
            group.create_task(self._turns(_Turn(session, 0, ask, prepared, session.at_s), group))

    async def _turns(self, turn: _Turn, group: asyncio.TaskGroup) -> None:
        """Run a turn and those that follow it; where a trace's conversation branches, the others run in tasks of their own."""
        following = [turn]
        while following:
            turn, *branches = following
            for branch in branches:
                group.create_task(self._turns(branch, group))
            following = await self._turn(turn)

    async def _turn(self, turn: _Turn) -> list[_Turn]:
        """Send a turn when it is due, and keep its record. Return the turns that follow it: none if it failed."""
        early_s = turn.due_s - self.now_s()
        if early_s > 0:
            await asyncio.sleep(early_s)
        call = _Call(self.now_s())
        try:
            outcome, error = await self._request(turn, call)
        except asyncio.CancelledError:
            self._keep(_record(turn, call, self.now_s(), Outcome.ABORTED, ""))
            raise
        self._keep(_record(turn, call, self.now_s(), outcome, error))
        return self._following(turn, call.answer) if outcome is Outcome.OK else []

    def _following(self, turn: _Turn, answer: Answer) -> list[_Turn]:
        """Return the next turns. History is what was sent and what was answered; a trace's turns have it in their segments."""
        session, asked, ended_s = turn.session, turn.ask.said, self.now_s()
        said = (*asked[:-1], Said(asked[-1].segments, answer))
        following = []
        for number in session.next_turns(turn.number):
            planned = session.turns[number]
            due_s = ended_s + planned.think_s if planned.due_s is None else planned.due_s
            if due_s > self._settings.stop_turns_s:
                continue
            ask = self._ask(session, number, (*(said if planned.due_s is None else ()), Said(planned.segments)))
            ready_s = ended_s if due_s < ended_s else None
            following.append(_Turn(session, number, ask, self._target.prepare(ask), due_s, ready_s))
        if len(following[0].ask.said if following else ()) > 1 and answer.num_tokens > 1:
            # A token has KV once the one after it is computed, so the last one of an answer has none.
            self._sent.add([*turn.pieces, turn.answer_piece(len(asked) - 1, answer.num_tokens - 1)])
        return following

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
            session_id=f"{settings.request_id_prefix}-{session.index}",
        )

    async def _request(self, turn: _Turn, call: _Call) -> tuple[Outcome, str]:
        """Send one request and wait for its end. Return how it ended and, unless that was planned, why."""
        log, settings = self.log, self._settings
        if log.num_running >= settings.max_concurrency:
            return Outcome.NOT_SENT, f"{settings.max_concurrency} requests were running already"
        cancel_after_s = turn.session.turns[turn.number].cancel_after_s
        timeout_s = min(settings.timeout_s, settings.give_up_s - turn.start_s)
        waited_s = timeout_s if cancel_after_s is None else min(cancel_after_s, timeout_s)
        call.reusable_tokens = self._sent.add(turn.pieces)
        log.num_running += 1
        try:
            async with asyncio.timeout_at(log.started_at + turn.start_s + waited_s):
                await self._receive(turn.prepared, call)
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


def _record(turn: _Turn, call: _Call, end_s: float, outcome: Outcome, error: str) -> Record:
    session, traffic, done = turn.session, turn.session.traffic, call.done
    prompt_tokens = sum(num_tokens for _, num_tokens in turn.pieces)
    return Record(
        session=session.index,
        turn=turn.number,
        traffic_class=traffic.name,
        tenant=traffic.tenant,
        priority=traffic.priority,
        scheduled_s=turn.due_s,
        sent_s=call.sent_s,
        end_s=end_s,
        outcome=outcome,
        input_tokens=turn.ask.num_input_tokens if done.input_tokens is None else done.input_tokens,
        output_tokens=call.num_output_tokens,
        cached_tokens=done.cached_tokens,
        token_times=call.times,
        error=error,
        phases_ms=done.phases_ms,
        workers=done.workers,
        num_turns=len(session.turns),
        depth=session.depth(turn.number),
        ready_s=turn.ready_s,
        prompt_tokens=prompt_tokens,
        # The last token of a prompt is computed in any case: its output is the first token of the answer.
        reusable_tokens=min(call.reusable_tokens, prompt_tokens - 1),
    )
