"""An engine as a worker composes it, opened in this process, and its requests followed: for tests of the contract."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from pdmesh.engine.errors import EngineStopped
from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.outputs import FinishReason, KVReady, RequestStarted, SequenceUpdate, StepResult, TokenLogprobs
from pdmesh.engine.request import EngineRequest
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.sampling_params import SamplingParams
from pdmesh.worker.engines.base import EngineEvents, WorkerEngine
from pdmesh.worker.step_dispatcher import StepDispatcher
from tests.support.waiting import eventually

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=11, max_tokens=8, ignore_eos=True)


def prompt(num_tokens: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(10 + (7 * i + 13 * salt) % 200 for i in range(num_tokens))


root = b""  # of the block hashes of each test's requests


def request(
    name: str, num_tokens: int = 40, sampling: SamplingParams = GREEDY, *, salt: int = 0, **more: object
) -> EngineRequest:
    return EngineRequest(name, prompt(num_tokens, salt), sampling, **{"cache_root": root, **more})  # type: ignore[arg-type]


@dataclass
class Followed:
    """What an engine said of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    indexes: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    started: list[RequestStarted] = field(default_factory=list)
    ready: list[KVReady] = field(default_factory=list)

    def on_update(self, update: SequenceUpdate) -> None:
        tokens = self.tokens.setdefault(update.choice, [])
        indexes = self.indexes.setdefault(update.choice, [])
        tokens.extend(update.token_ids)
        indexes.extend(range(update.index, update.index + len(update.token_ids)))
        self.logprobs.setdefault(update.choice, []).extend(update.logprobs)
        if update.finish_reason is not None:
            assert update.choice not in self.finished, "a choice ends once"
            self.finished[update.choice] = update.finish_reason

    def on_started(self, started: RequestStarted, ended_ns: int) -> None:
        assert self.tokens, "the updates of the first step come before"
        self.started.append(started)

    def on_ready(self, ready: KVReady) -> None:
        self.ready.append(ready)

    @property
    def output(self) -> list[int]:
        return self.tokens.get(0, [])


class Opened:
    """An open engine."""

    def __init__(self, engine: WorkerEngine) -> None:
        self.engine = engine
        self.dispatcher = StepDispatcher()
        self.steps: list[StepResult] = []
        self.failures: list[BaseException] = []
        self.cache = engine.prefix_cache(10_000)
        self.first = engine.first_stats()
        self.prior: LatencyModel | None = None

    def follow(self, name: str) -> Followed:
        followed = Followed()
        self.dispatcher.add(name, followed, followed.on_ready)
        return followed

    async def run(self, asked: EngineRequest, *, by: str = "add") -> Followed:
        """The whole output of a request that is computed here."""
        followed = self.follow(asked.request_id)
        if by == "add":
            assert await self.engine.add(asked)
        else:
            assert await self.engine.reserve_local(asked) is not None
        await self.finished(followed, asked.sampling.n)
        return followed

    async def finished(self, followed: Followed, num_choices: int = 1) -> None:
        await eventually(lambda: len(followed.finished) == num_choices or self.failures, timeout_s=60)
        assert not self.failures, self.failures

    async def is_whole(self) -> bool:
        stats = await self.engine.stats()
        busy = stats.num_running + stats.num_waiting + stats.num_reserved + stats.num_held
        return busy == 0 and stats.num_free_blocks == stats.num_total_blocks

    async def until_whole(self) -> None:
        for _ in range(1000):
            if await self.is_whole():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"not whole: {await self.engine.stats()}")

    async def prefilled(self, asked: EngineRequest) -> tuple[Followed, KVReady]:
        """The first token, and the held blocks, of a prefill_only request, which is named `prefill NAME`."""
        named = replace(asked, request_id=f"prefill {asked.request_id}", prefill_only=True)
        followed = self.follow(named.request_id)
        assert await self.engine.add(named)
        total = len(asked.prompt) + (len(asked.emitted[0]) if asked.emitted else 0)
        await eventually(lambda: followed.output and followed.ready and followed.ready[-1].num_tokens >= total, timeout_s=60)
        return followed, followed.ready[-1]


@asynccontextmanager
async def opened(engine: WorkerEngine) -> AsyncIterator[Opened]:
    """An engine that is stepping; at the end it must be whole, and it is stopped."""
    it = Opened(engine)

    def on_step(result: StepResult) -> None:
        it.steps.append(result)
        it.dispatcher.on_step(result)

    it.prior = await engine.open(EngineEvents(on_step, it.dispatcher.on_ready, it.failures.append), ())
    try:
        yield it
        with contextlib.suppress(EngineStopped):  # by the test itself
            await it.until_whole()
        assert not it.failures, it.failures
    finally:
        await engine.stop()


def handed_over(source: WorkerEngine, ready: KVReady, target: WorkerEngine, granted: ReservedBlocks) -> None:
    """Copy the KV that decode lacks, as a transfer does."""
    first = granted.num_cached_tokens // target.facts.block_size
    theirs, ours = ready.block_ids[first:], granted.block_ids[first : len(ready.block_ids)]
    for layer in range(source.memory.num_layers):
        for plane in range(source.memory.num_planes):
            for here, there in zip(theirs, ours, strict=True):
                target.memory.block_view(layer, plane, there)[:] = source.memory.block_view(layer, plane, here)
