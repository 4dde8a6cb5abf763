"""The hand-off of 1 GB of KV at the shape of 8B between two processes on this GPU, over every transport that both ends offer.

alone     the KV is there: from the call of the push until the receiver has committed
beside    it is pushed as the prefill makes it final; what the transfer adds to the prefill is what is not hidden:

          prefill alone   ├──────────────┤
          with the push   ├────────────────┤ last layer ┤ committed          (with - alone) / transfer
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.engine_runs import GREEDY
from benchmarks.gpu.context import Context, replayed_s
from benchmarks.gpu.handoff_ends import BLOCK_SIZE, MODEL, Ends, ends_for, fingerprint, one_launch_at_a_time
from benchmarks.gpu.steady import prompt_of
from benchmarks.handoff.ends import EPOCH, PUSH_TIMEOUT_S, TOKENS
from benchmarks.harness import Figure
from kvtransfer.errors import PushFailed
from kvtransfer.native import library
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
from tests.support.random_weights import engine_config

# What comes of the rounds of a hand-off over one transport. Pure.


MILLISECONDS_GOAL, EXPOSED_GOAL = 10.0, 5.0


@dataclass
class Samples:
    """Of one transport; seconds, but `late_ns`: from the last step's end to the commit."""

    alone: list[float] = field(default_factory=list)  # prefills with nobody to hand off to
    beside: list[float] = field(default_factory=list)  # prefills while their KV leaves
    late_ns: list[int] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def transfer_s(self) -> float:
        return statistics.median(self.transfer)

    @property
    def late_s(self) -> float:
        return statistics.median(self.late_ns) / 1e9

    @property
    def slower(self) -> float:
        """Share by which the prefill is slower while it is handed off: of each round, whose prefills ran one after the other."""
        return statistics.median(beside / alone for beside, alone in zip(self.beside, self.alone, strict=True)) - 1

    @property
    def exposed(self) -> float:
        """Share of the transfer that comes on top of the prefill."""
        rounds = zip(self.alone, self.beside, self.late_ns, strict=True)
        return statistics.median(beside + late / 1e9 - alone for alone, beside, late in rounds) / self.transfer_s


def figures(transport: str, samples: Samples, bytes_per_s: float, *, is_best: bool) -> Iterator[Figure]:
    """The limit: every byte read and written once. Goals are for the transport that a mesh takes here."""
    name = f"hand-off of {size_words(samples.num_bytes)} of KV between two processes on the device, {transport}"
    least_ms, transfer_ms = 2 * samples.num_bytes / bytes_per_s * 1e3, samples.transfer_s * 1e3
    yield Figure(name, transfer_ms, "ms", "lower", goal=MILLISECONDS_GOAL if is_best else None, limit=least_ms)
    yield Figure(f"{name}: share of bandwidth", 100 * least_ms / transfer_ms, "%", "higher", limit=100.0)
    beside, goal = f"hand-off beside its prefill, {transport}", EXPOSED_GOAL if is_best else None
    yield Figure(f"{beside}: part that is not hidden", 100 * samples.exposed, "%", "lower", goal=goal, limit=0.0)
    yield Figure(f"{beside}: from the last layer to the commit", samples.late_s * 1e3, "ms", "lower")
    yield Figure(f"{beside}: what the prefill loses", 100 * samples.slower, "%", "lower", limit=0.0)


def size_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e3:.3g} KB"


# The sending end of the measured hand-off: a real engine that prefills, its pool staged as a prefill worker's on a GPU.


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
    argv = (sys.executable, "-m", "benchmarks.gpu.handoff_ends", ends.to_json())
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    try:
        yield Other(process)
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(10.0):
            await process.wait()
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
            self._block_ids = tuple(ready.block_ids)
            self._feed.advance(Ready(ready.num_tokens // BLOCK_SIZE, ready.num_step_tokens // BLOCK_SIZE, ready.num_layers))
            self._began.set()
        if self._feed.group:
            self._engine.exports.signal.notify_every(self._feed.group)

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


ROUNDS = 3
PINNED_BYTES = 1 << 28
EXPECTED_S = 8.0  # of one transport


def run(context: Context) -> None:
    if context.device == "cpu":
        one_launch_at_a_time()
    library.prepare()  # else the first rounds would be Python's
    _pinned(context)
    asyncio.run(_measure(context, ends_for(context.device, context.scale)))


def _pinned(context: Context) -> None:
    """What a transport that goes through the host is limited by."""
    size = min(PINNED_BYTES, context.scale.copy_bytes)
    source = torch.ones(size, dtype=torch.uint8, device=context.device)
    room = streams_of(source.device).host_room(size)
    copies = {"to": partial(room.copy_, source, non_blocking=True), "from": partial(source.copy_, room, non_blocking=True)}
    for words, copy in copies.items():
        copy()
        seconds = replayed_s({"": copy}, context.device)[""]  # so long that nobody sees a launch: no graph
        context.add(Figure(f"copies {words} pinned memory of the host", size / seconds / 1e9, "GB/s", "higher"))


async def _measure(context: Context, ends: Ends) -> None:
    from tests.support.random_models import make_subject  # triton is not installed everywhere

    size = ends.shape.num_bytes
    context.note(
        f"hand-off: {size_words(size)} are {size} bytes: {ends.num_blocks} blocks of {BLOCK_SIZE} tokens, read and written"
    )
    config = engine_config(context.device, max_num_seqs=1, max_context=ends.num_tokens + BLOCK_SIZE)
    async with receiving(ends) as other:  # it starts while weights are drawn
        subject = make_subject(context.scale.config(MODEL), "none", config, context.dtype)
        end = SendingEnd(ends, subject.engine)
        await end.start()
        try:
            names = end.transports((await other.read())["transports"])
            await _warm_up(end)
            await _over_all(context, end, other, names)
        finally:
            await end.close()
        subject.close()


async def _over_all(context: Context, end: SendingEnd, other: Other, names: list[str]) -> None:
    """Goals are for the first that works: a mesh takes it."""
    is_best = True
    for name in names:
        if not context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"hand-off over {name}"):
            continue
        try:
            samples = await _samples(context, end, other, name)
        except PushFailed as error:
            context.fail(f"hand-off over {name}: {error}")
            await end.release()
            continue
        for figure in figures(name, samples, context.machine.bytes_per_s, is_best=is_best):
            context.add(figure)
        is_best = False


async def _warm_up(end: SendingEnd) -> None:
    await end.prefill()
    await end.release()


async def _samples(context: Context, end: SendingEnd, other: Other, name: str) -> Samples:
    """Alone, beside, in turn; what has arrived is compared after each kind of push."""
    samples = Samples()
    began = time.monotonic()
    for number in range((ROUNDS if context.device == "cuda" else 1) + 1):
        alone = await end.prefill()
        result = await end.push_all(await other.reserve(name))
        await _compare(context, end, other, f"{name}, of a prefill that is over", number)
        await end.release()
        beside, late_ns = await end.prefill_and_push(await other.reserve(name))
        await _compare(context, end, other, f"{name}, beside the prefill", number)
        await end.release()
        if number == 0:
            continue  # it warms up: what each side compiles, and what the sender learns of the link
        samples.num_bytes = result.num_bytes
        samples.alone.append(alone.seconds)
        samples.transfer.append(result.elapsed_ns / 1e9)
        samples.beside.append(beside.seconds)
        samples.late_ns.append(late_ns)
        if not context.deadline.allows((time.monotonic() - began) / (number + 1)):
            break
    return samples


async def _compare(context: Context, end: SendingEnd, other: Other, name: str, number: int) -> None:
    """The first of its kind: it is not what is measured."""
    if number == 0 and (await other.ask({"sums": True}))["sums"] != end.sums():
        context.fail(f"hand-off over {name}: what has arrived is not what was sent")
