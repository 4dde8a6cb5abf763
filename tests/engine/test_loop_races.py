"""Calls of the event loop while the engine's thread steps, for real: threads switch every few instructions.

Every call comes at whatever point of a step the system chooses; tokens are the oracle's, and the pool is whole at the end.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from pdmesh.engine.engine import Engine, EngineStep
from pdmesh.engine.loop import EngineLoop
from pdmesh.engine.outputs import StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.support.ahead_model import AheadMock
from tests.support.guesser import Guesser
from tests.support.mock_engine import Collector, answer, make_engine, write_kv

T = TypeVar("T")
NUM_REQUESTS = 60
NUM_AT_ONCE = 6
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@dataclass
class Client:
    """A router's side of one engine, which decides by chance."""

    loop: EngineLoop[Engine]
    rng: random.Random
    collector: Collector = field(default_factory=Collector)
    failures: list[BaseException] = field(default_factory=list)
    num_during_steps: int = 0

    async def play(self, number: int) -> None:
        """One request from its beginning to its end, or to where it is cancelled."""
        prompt = tuple(self.rng.choice([(4, 5, 6, 7) * 3, (8, 4) * 5, ()])) + (self.rng.randint(4, 9),) * self.rng.randint(1, 5)
        sampling = SamplingParams(temperature=1.0, max_tokens=self.rng.randint(2, 9), seed=number, ignore_eos=True)
        request = EngineRequest(f"r{number}", prompt, sampling)
        expected, expects = request, self.rng.random() < 0.8
        way = self.rng.choice(["add", "start", "start", "local", "dropped"])
        if way == "add":
            while not self.now(lambda engine: engine.add(request)):
                await self.others()
        else:
            while (granted := self.now(lambda engine: engine.reserve(request))) is None:
                await self.others()
            await self.others()
            if way == "dropped":
                assert self.now(lambda engine: engine.try_release(request.request_id))
                return
            if way == "local":
                self.now(lambda engine: engine.run_local(request.request_id, request))
            else:
                write_kv(self.loop._engine, granted.block_ids, prompt, granted.num_cached_tokens)
                [first] = answer(request, 0, max_new=1).token_ids
                self.now(lambda engine: engine.start(request.request_id, {0: first}))
                expected = replace(request, emitted=((first,),))
        if expects:
            while self.collector.answer(request.request_id).finish_reason is None:
                assert not self.failures, self.failures
                await self.others()
            assert self.collector.answer(request.request_id) == answer(expected, 0)
        elif self.now(lambda engine: engine.try_release(request.request_id)) is None:
            await self.loop.call(lambda engine: engine.release(request.request_id))

    async def others(self) -> None:
        await asyncio.sleep(0)

    def now(self, fn: Callable[[Engine], T]) -> T:
        self.num_during_steps += bool(self.loop._engine._scheduler.in_step)
        return self.loop.now(fn)


def let_steps_take_time(engine: Engine, rng: random.Random) -> None:
    """As kernels do, without the interpreter's lock: before what they write, and behind it."""
    run = engine.run_step

    def slow(step: EngineStep) -> None:
        time.sleep(rng.random() * 1e-3)
        run(step)
        time.sleep(rng.random() * 1e-3)

    engine.run_step = slow  # type: ignore[method-assign]


@asynccontextmanager
async def stepping(engine: Engine, seed: int) -> AsyncIterator[Client]:
    collector, failures = Collector(), list[BaseException]()

    def on_step(result: StepResult) -> None:
        collector.take(result)

    loop = EngineLoop(engine, on_step, failures.append)
    loop.start(asyncio.get_running_loop())
    try:
        yield Client(loop, random.Random(seed), collector, failures)
    finally:
        await loop.stop()


@pytest.mark.parametrize("kind", ["plain", "drafts", "ahead"])
@pytest.mark.parametrize("seed", range(3))
async def test_requests_come_and_go_at_any_point_of_a_step(kind: str, seed: int) -> None:
    engine = make_engine(
        num_blocks=24,
        max_num_batched_tokens=8,
        proposers=[Guesser(0.5, branches=False)] if kind == "drafts" else [],
        draft_length=4 if kind == "drafts" else 0,
        model=AheadMock() if kind == "ahead" else None,
    )
    let_steps_take_time(engine, random.Random(seed))
    async with asyncio.timeout(DEADLINE_S), stepping(engine, seed) as client:
        for first in range(0, NUM_REQUESTS, NUM_AT_ONCE):
            await asyncio.gather(*(client.play(number) for number in range(first, first + NUM_AT_ONCE)))
        await client.loop.call(Engine.check_integrity)
        stats = await client.loop.call(Engine.stats)
        assert not client.failures
        assert stats.num_free_blocks == stats.num_total_blocks
        assert (stats.num_running, stats.num_waiting, stats.num_reserved) == (0, 0, 0)
        assert client.num_during_steps, "no call came while a step ran: this tests nothing"
