"""The sending end of the measured hand-off: a real engine that prefills, its pool staged as a prefill worker's on a GPU."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_runs import GREEDY
from benchmarks.gpu.handoff_ends import BLOCK_SIZE, Ends, fingerprint
from benchmarks.gpu.steady import prompt_of
from benchmarks.handoff.ends import EPOCH, PUSH_TIMEOUT_S, TOKENS
from kvtransfer.sender.push import PushJob, PushResult
from kvtransfer.sender.send_queue import KVReadiness, Ready, complete_readiness
from kvtransfer.sender.sender import Sender
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.registry import transports_with
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.streams import streams_of
from pdmesh.engine.loop import EngineLoop
from pdmesh.engine.outputs import KVReady, StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.v1 import common_pb2
from pdmesh.worker.kv_memory import sharing_for, stage


@dataclass(frozen=True)
class Prefilled:
    """Seconds of a prefill from its first step's beginning to its last step's end; time.monotonic_ns of the latter."""

    seconds: float
    ended_ns: int
    block_ids: tuple[int, ...]


class Other:
    """The receiving process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def read(self) -> dict[str, Any]:
        """Raises RuntimeError where it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the receiving process ended with status {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.read()

    async def reserve(self, transport: str) -> common_pb2.Reservation:
        answer = await self.ask({"reserve": transport})
        return common_pb2.Reservation.FromString(bytes.fromhex(answer["reservation"]))


@asynccontextmanager
async def receiving(ends: Ends) -> AsyncIterator[Other]:
    """It has begun to start."""
    pipe = asyncio.subprocess.PIPE
    argv = (sys.executable, "-m", "benchmarks.gpu.handoff_receiver", ends.to_json())
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    try:
        yield Other(process)
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 10.0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class SendingEnd:
    """Prefills one request at a time, and hands it off while or after it is computed. Close the engine behind it."""

    def __init__(self, ends: Ends, engine: Engine) -> None:
        self._ends, self._engine = ends, engine
        device = engine.kv.tensor.device
        self._memory = stage(engine, streams_of(device), *ends.sizes(), sharing=sharing_for(device))
        self._sender = Sender(self._memory, ends.identity, ends.layout, EPOCH + 1)
        self._loop = EngineLoop(engine, self._on_step, self._on_failure, self._on_ready)
        self._measuring: asyncio.Task[Any] | None = None
        self._began = asyncio.Event()
        self._ended = asyncio.Event()
        self._feed = KVReadiness()
        self._block_ids: tuple[int, ...] = ()
        self._steps: list[StepResult] = []
        self._number = 0

    async def start(self) -> None:
        self._measuring = asyncio.current_task()
        self._loop.start(asyncio.get_running_loop())

    async def close(self) -> None:
        await self._sender.close()
        await self._loop.stop()
        self._memory.close()

    def transports(self, offered: list[str]) -> list[str]:
        """Those that both ends offer, best first; nixl, where its package is installed, last: a mesh takes it only if told to."""
        ours = transports_with(None)
        found = [name for name, transport in ours.items() if name in offered and transport.sends(self._memory)]
        for transport in ours.values():
            transport.close()
        return sorted(found, key=lambda name: name == NixlTransport.name)

    async def prefill(self) -> Prefilled:
        """With nobody to hand it to. Its blocks stay until `release`."""
        await self._begin()
        await self._ended.wait()
        return self._prefilled()

    async def prefill_and_push(self, reservation: common_pb2.Reservation) -> tuple[Prefilled, int]:
        """Also: from the end of its last step until the receiver has committed, nanoseconds."""
        await self._begin()
        await self._began.wait()
        await self._push(reservation, self._feed)
        committed_ns = time.monotonic_ns()
        return self._prefilled(), committed_ns - self._steps[-1].ended_ns

    async def push_all(self, reservation: common_pb2.Reservation) -> PushResult:
        """Of a prefill that is over."""
        return await self._push(reservation, complete_readiness(self._ends.num_layers, self._ends.num_blocks, TOKENS))

    async def release(self) -> None:
        await self._loop.call(lambda engine: engine.release(self._name))

    def sums(self) -> list[int]:
        return fingerprint(self._engine.kv, list(self._block_ids))

    @property
    def _name(self) -> str:
        return f"handed-{self._number}"

    async def _begin(self) -> None:
        self._number += 1
        self._began.clear()
        self._ended.clear()
        self._feed, self._steps, self._block_ids = KVReadiness(), [], ()
        prompt = prompt_of(self._engine, self._number, self._ends.num_tokens)
        request = EngineRequest(self._name, prompt, GREEDY.params(2, ignore_eos=True), prefill_only=True)
        if not await self._loop.call(lambda engine: engine.add(request)):
            raise RuntimeError("the engine has no room for a prompt")

    async def _push(self, reservation: common_pb2.Reservation, feed: KVReadiness) -> PushResult:
        steps = self._steps
        job = PushJob(reservation, self._block_ids, self._ends.num_tokens, feed, num_steps=lambda: len(steps))
        return await self._sender.push(job, timeout_s=PUSH_TIMEOUT_S)

    def _on_ready(self, told: tuple[KVReady, ...]) -> None:
        for ready in told:
            self._block_ids = ready.block_ids
            self._feed.advance(Ready(ready.num_tokens // BLOCK_SIZE, ready.num_step_tokens // BLOCK_SIZE, ready.num_layers))
            self._began.set()
        if self._feed.group:
            self._engine.exports.signal.tell_every(self._feed.group)

    def _on_failure(self, error: BaseException) -> None:
        """Whoever measures waits for a step that does not come."""
        print(f"the engine failed: {error!r}", file=sys.stderr)
        if self._measuring is not None:
            self._measuring.cancel()

    def _on_step(self, result: StepResult) -> None:
        self._steps.append(result)
        self._on_ready(result.ready)
        if any(update.request_id == self._name for update in result.updates):
            self._feed.end(TOKENS)
            self._ended.set()

    def _prefilled(self) -> Prefilled:
        first, last = self._steps[0], self._steps[-1]
        return Prefilled((last.ended_ns - first.started_ns) / 1e9, last.ended_ns, self._block_ids)
