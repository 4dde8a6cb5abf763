"""How long a decode worker takes to reserve blocks while its engine computes long steps, beside the same worker at rest.

Windows of either kind take turns. In a busy one the worker computes prompts itself, in steps of as many tokens as it takes; the
reservations are for other requests, and are given back at once.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio

from benchmarks.engine_runs import prompt
from benchmarks.harness import Figure, say
from benchmarks.spread import Spread
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model
from pdmesh.runtime.child import ManagedProcess
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import common_pb2, decode_pb2, decode_pb2_grpc, mesh_pb2, worker_pb2, worker_pb2_grpc

GOAL_MS = 2.0
MIN_WINDOWS, CALLS_IN_A_WINDOW = 5, 40
BETWEEN_S = 0.01
STEP_TOKENS, NUM_PROMPTS, RESERVED_TOKENS = 4000, 2, 300
_STEPS = ("--max-context", "4200", "--max-num-batched-tokens", str(STEP_TOKENS), "--num-blocks", "1400")
FLAGS = (*_STEPS, "--grace-s", "60", "--no-prefix-caching", "--lease-s", "30")


class DecodeWorker:
    """A decode worker, and a router's part in reserving on it."""

    def __init__(self, channel: grpc.aio.Channel, model: str) -> None:
        self._stub, self._model = decode_pb2_grpc.DecodeServiceStub(channel), model
        self._numbers = itertools.count(1)

    async def submit(self, num_tokens: int, *, computes: bool) -> str:
        """Reserve for a prompt of its own, which the worker `computes`, or another would; return the request's id."""
        mode = mesh_pb2.PREFILL_MODE_LOCAL if computes else mesh_pb2.PREFILL_MODE_REMOTE
        number = next(self._numbers)
        request = common_pb2.TokenRequest(
            model=self._model,
            prompt_token_ids=prompt(number, num_tokens),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=2, seed=1, ignore_eos=True),
        )
        name = f"bench-{number}"
        await self._stub.Submit(
            decode_pb2.SubmitRequest(request_id=name, router_id="bench", attempt=1, mode=mode, request=request)
        )
        return name

    async def cancel(self, name: str) -> None:
        """End the request."""
        await self._stub.Cancel(decode_pb2.CancelRequest(request_id=name))

    async def reserve_s(self) -> float:
        """Seconds of one reservation, as a router sees them."""
        started = time.perf_counter()
        name = await self.submit(RESERVED_TOKENS, computes=False)
        seconds = time.perf_counter() - started
        await self.cancel(name)
        return seconds


@asynccontextmanager
async def decode_worker(model: Path) -> AsyncIterator[DecodeWorker]:
    """A worker on `model`, as a process."""
    argv = [sys.executable, "-m", "decode_service", "--model", str(model), "--model-name", "bench", *FLAGS]
    async with AsyncExitStack() as stack:
        process = ManagedProcess("decode", argv)
        stack.push_async_callback(process.stop)
        await process.start(timeout_s=120)
        channel = connect(process.address)
        stack.push_async_callback(channel.close)
        info = await worker_pb2_grpc.WorkerControlStub(channel).GetInfo(worker_pb2.GetInfoRequest())
        yield DecodeWorker(channel, info.identity.model)


async def window_ms(worker: DecodeWorker, *, is_busy: bool) -> float:
    """Milliseconds of a reservation, the median of a window's."""
    names = [await worker.submit(STEP_TOKENS, computes=True) for _ in range(NUM_PROMPTS if is_busy else 0)]
    seconds = []
    for _ in range(CALLS_IN_A_WINDOW):
        await asyncio.sleep(BETWEEN_S)
        seconds.append(await worker.reserve_s())
    for name in names:
        await worker.cancel(name)
    return 1e3 * statistics.median(seconds)


async def measure(model: Path, num_windows: int) -> dict[bool, list[float]]:
    """Milliseconds of each window, of the busy ones (True) and of those at rest."""
    found: dict[bool, list[float]] = {False: [], True: []}
    async with decode_worker(model) as worker:
        for is_busy in (False, True):
            await window_ms(worker, is_busy=is_busy)
        for _ in range(num_windows):
            for is_busy, windows in found.items():
                windows.append(await window_ms(worker, is_busy=is_busy))
                say(f"reserve while {'a step runs' if is_busy else 'nothing runs'}: {windows[-1]:.2f} ms")
    return found


def reserve_figures(rounds: int) -> list[Figure]:
    """On SmolLM2, in steps of seconds."""
    found = asyncio.run(measure(ensure_model(DEFAULT_MODEL), max(MIN_WINDOWS, rounds)))
    rest, busy = Spread.of(found[False]), Spread.of(found[True])
    more = Spread.of(with_step - without for without, with_step in zip(found[False], found[True], strict=True))
    return [
        Figure("reserve while a step runs", busy.median, "ms", "lower", goal=GOAL_MS, limit=rest.median, peer=busy.in_words),
        Figure("reserve while a step runs, beyond a worker at rest", more.median, "ms", "lower", peer=more.in_words),
    ]
