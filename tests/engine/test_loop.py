"""The engine thread and its bridge to asyncio."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pdmesh.engine.engine import Engine
from pdmesh.engine.errors import EngineStopped, InvalidRequest
from pdmesh.engine.loop import EngineLoop
from pdmesh.engine.outputs import StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.draft import Draft
from pdmesh.sampling_params import SamplingParams
from tests.support.mock_engine import Collector, answer, make_engine

DEADLINE_S = 10.0


def request(request_id: str, max_tokens: int = 8) -> EngineRequest:
    return EngineRequest(request_id, (5, 6, 7, 8, 9), SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))


class Client:
    """What a service keeps beside the loop: results, and a condition to wait on."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.steps: list[int] = []
        self.threads: set[int] = set()
        self.failures: list[BaseException] = []
        self._changed = asyncio.Event()

    def on_step(self, result: StepResult) -> None:
        self.collector.take(result)
        self.steps.append(result.step)
        self.threads.add(threading.get_ident())
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_finished(self, request_id: str) -> None:
        await self.until(lambda: self.collector.answer(request_id).finish_reason is not None)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[tuple[EngineLoop[Engine], Client]]:
    client = Client()
    loop = EngineLoop(engine, client.on_step, client.failures.append)
    loop.start(asyncio.get_running_loop())
    try:
        yield loop, client
    finally:
        await loop.stop()


async def within_deadline(awaitable: Awaitable[object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await awaitable


async def test_requests_run_and_results_arrive_in_order_on_the_event_loop() -> None:
    async with running(make_engine()) as (loop, client):
        for name in "abc":
            assert await loop.call(lambda engine, name=name: engine.add(request(name)))  # type: ignore[misc]
        for name in "abc":
            await client.until_finished(name)
            assert client.collector.answer(name) == answer(request(name), 0)
        assert client.steps == list(range(1, len(client.steps) + 1))
        assert client.threads == {threading.get_ident()}


async def test_calls_run_on_the_engine_thread_and_return_or_raise() -> None:
    async with running(make_engine()) as (loop, _):
        assert await loop.call(lambda _: threading.get_ident()) != threading.get_ident()
        with pytest.raises(InvalidRequest, match="prompt"):
            await loop.call(lambda engine: engine.add(EngineRequest("r", (), SamplingParams(max_tokens=1))))
        assert await loop.call(lambda engine: engine.release("r")) is False, "an error of a call ends nothing"


async def test_it_wakes_from_idle_and_blocked_waiting_does_not_spin() -> None:
    engine = make_engine(num_blocks=4)
    async with running(engine) as (loop, client):
        await loop.call(lambda engine: engine.reserve(request("kept")))
        await loop.call(lambda engine: engine.add(request("waits", 11)))
        num_schedules = 0
        schedule = engine._scheduler.schedule

        def counting(now_ns: int, drafts: dict[Sequence, Draft]) -> object:
            nonlocal num_schedules
            num_schedules += 1
            return schedule(now_ns, drafts)

        await loop.call(lambda engine: setattr(engine._scheduler, "schedule", counting))
        for _ in range(5):
            await loop.call(lambda engine: engine.stats())
        assert num_schedules <= 20, "one look after each call, and the steps that it can do"
        await loop.call(lambda engine: engine.release("kept"))
        await client.until_finished("waits")


async def test_the_event_loop_goes_on_while_a_step_takes_long() -> None:
    engine = make_engine()
    entered, proceed = threading.Event(), threading.Event()
    run = engine._runner.run

    def slow(plan: object, signal: object, *, keep_hidden: bool) -> object:
        entered.set()
        assert proceed.wait(DEADLINE_S)
        return run(plan, signal)  # type: ignore[arg-type]

    engine._runner.run = slow  # type: ignore[assignment, method-assign]
    async with running(engine) as (loop, client):
        await loop.call(lambda engine: engine.add(request("r")))
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        pending = asyncio.create_task(loop.call(lambda engine: engine.stats()))
        await asyncio.sleep(0)  # we are here although the engine is in its step
        assert not pending.done()
        proceed.set()
        assert (await pending).num_steps >= 1
        await client.until_finished("r")


def hold_event_loop(until: Callable[[], bool]) -> None:
    """Not the interpreter, which the engine needs too. Looks are counted, not time: a process that is stopped does not wait."""
    for _ in range(1000):
        if until():
            return
        time.sleep(DEADLINE_S / 1000)
    raise AssertionError("the engine waits for the event loop")


async def test_the_engine_goes_on_while_the_event_loop_is_busy() -> None:
    engine = make_engine()
    async with running(engine) as (loop, client):
        await loop.call(lambda engine: engine.add(request("r")))
        hold_event_loop(lambda: engine.stats().num_generated_tokens == 8)  # counters may be read from any thread
        await client.until_finished("r")


async def test_after_a_release_no_more_updates_come() -> None:
    async with running(make_engine(max_context=2000, num_blocks=600)) as (loop, client):
        await loop.call(lambda engine: engine.add(request("r", 1500)))
        await client.until(lambda: ("r", 0) in client.collector.choices)
        assert await loop.call(lambda engine: engine.release("r"))
        got = len(client.collector.answer("r").token_ids)
        await loop.call(lambda engine: engine.add(request("other")))
        await client.until_finished("other")
        assert len(client.collector.answer("r").token_ids) == got


async def test_a_failing_step_is_reported_and_fails_calls() -> None:
    engine = make_engine()
    entered, proceed = threading.Event(), threading.Event()

    def broken(_plan: object, _signal: object, *, keep_hidden: bool) -> object:
        entered.set()
        proceed.wait(DEADLINE_S)
        raise RuntimeError("no such kernel")

    engine._runner.run = broken  # type: ignore[assignment, method-assign]
    async with running(engine) as (loop, client):
        await loop.call(lambda engine: engine.add(request("r")))
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        pending = asyncio.create_task(loop.call(lambda engine: engine.stats()))
        await asyncio.sleep(0)
        proceed.set()
        with pytest.raises(EngineStopped, match="no such kernel"):
            await asyncio.wait_for(pending, DEADLINE_S)
        with pytest.raises(RuntimeError, match="no such kernel"):
            await loop.failed
        assert [str(failure) for failure in client.failures] == ["no such kernel"]
        with pytest.raises(EngineStopped, match="no such kernel"):
            await loop.call(lambda engine: engine.stats())


async def test_stop_runs_what_was_called_joins_and_refuses_the_rest() -> None:
    client = Client()
    loop = EngineLoop(make_engine(), client.on_step)
    with pytest.raises(EngineStopped, match="not been started"):
        await loop.call(lambda engine: engine.stats())
    loop.start(asyncio.get_running_loop())
    last = asyncio.create_task(loop.call(lambda engine: engine.add(request("r"))))
    await asyncio.sleep(0)
    await within_deadline(loop.stop())
    assert await last
    assert not loop._thread.is_alive()
    with pytest.raises(EngineStopped, match="stopped"):
        await loop.call(lambda engine: engine.stats())
    await within_deadline(loop.stop())


async def test_stop_before_start() -> None:
    await EngineLoop(make_engine(), lambda _: None).stop()


async def test_a_cancelled_wait_withdraws_a_call_that_has_not_begun() -> None:
    engine = make_engine()
    async with running(engine) as (loop, _):
        entered, proceed = threading.Event(), threading.Event()

        def block(_: Engine) -> None:
            entered.set()
            proceed.wait(DEADLINE_S)

        first = asyncio.create_task(loop.call(block))
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        second = asyncio.create_task(loop.call(lambda engine: engine.add(request("r"))))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        proceed.set()
        await first
        assert await loop.call(lambda engine: engine.release("r")) is False


async def test_context_variables_do_not_cross() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("a span of the caller")
    async with running(make_engine()) as (loop, _):
        assert await loop.call(lambda _: variable.get()) == "unset"
