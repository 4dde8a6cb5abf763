"""How much of a hand-off compute hides: from the start of a prefill until decode is ready, beside the same prefill with nobody to
push to, and beside a prefill that is followed by the transfer of all its KV.

A real prefill worker and a real decode worker; this process stands for the router. A slow link is a network namespace of our own
with a rate limit; it needs root and iproute2.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine_runs import prompt
from benchmarks.harness import Figure, say
from benchmarks.spread import Spread
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model
from pdmesh.runtime.child import ManagedProcess
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    mesh_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

LENGTHS = (500, 1000, 2000, 4000)
NETNS, LINK_RATE = "pdmesh-bench", "10gbit"
HERE, THERE = "10.199.77.1", "10.199.77.2"
NO_TRANSPORT = common_pb2.TransferEndpoint(transport="none", address="none")


@dataclass(frozen=True)
class Link:
    """How the two workers reach each other."""

    name: str
    transport: str
    is_remote: bool
    goal: float


LINKS = (
    Link("shm", "shm", False, 1.03),
    Link("tcp", "tcp", False, 1.03),
    Link("tcp over 10 Gbit/s", "tcp", True, 1.15),
)


@dataclass
class Times:
    """Seconds of each round: prefill alone, prefill and push until decode is ready, transfer of all of it behind a prefill."""

    alone: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


class Pair:
    """One prefill and one decode worker, and a router's part in a hand-off between them."""

    def __init__(self, stack: AsyncExitStack, prefill: str, decode: str) -> None:
        self._prefill_channel, self._decode_channel = connect(prefill), connect(decode)
        for channel in (self._prefill_channel, self._decode_channel):
            stack.push_async_callback(channel.close)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._prefill_channel)
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._decode_channel)
        self._names = itertools.count()
        self._identity: common_pb2.Identity | None = None

    async def hand_off(self, prompt: Sequence[int], *, push: bool) -> prefill_pb2.PrefillEvent:
        """The outcome. Without `push` decode has no transport that the prefill worker knows."""
        if self._identity is None:
            info = await worker_pb2_grpc.WorkerControlStub(self._decode_channel).GetInfo(worker_pb2.GetInfoRequest())
            self._identity = info.identity
        name = f"bench-{next(self._names)}"
        request = common_pb2.TokenRequest(
            model=self._identity.model,
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=2, seed=1, ignore_eos=True),
        )
        started = time.perf_counter()
        submit = decode_pb2.SubmitRequest(
            request_id=name, router_id="bench", attempt=1, mode=mesh_pb2.PREFILL_MODE_REMOTE, request=request
        )
        reservation = (await self._decode.Submit(submit)).reservation
        if not push:
            del reservation.endpoints[:]
            reservation.endpoints.append(NO_TRANSPORT)
        call = self._prefill.Prefill(
            prefill_pb2.PrefillRequest(request_id=name, request=request, reservation=reservation, identity=self._identity)
        )
        both = prefill_pb2.PrefillEvent()
        async for event in call:
            if event.HasField("first_tokens"):
                timings, first = event.first_tokens.timings, event.first_tokens
            else:
                both = event
        total_s = time.perf_counter() - started
        expected = prefill_pb2.HANDOFF_STATUS_COMMITTED if push else prefill_pb2.HANDOFF_STATUS_FAILED
        if both.outcome.status != expected:
            raise RuntimeError(f"hand-off of {len(prompt)} tokens: {both.outcome.message or 'it was not to be committed'}")
        await self._decode.Cancel(decode_pb2.CancelRequest(request_id=name))
        self.compute_s, self.exposed_s = timings.prefill_compute_ns / 1e9, both.outcome.kv_exposed_ns / 1e9
        self.beside_s = total_s - self.compute_s  # reserve, queues, what compute did not hide, and the way of all messages
        self.num_computed = first.timings.num_computed_tokens
        return both


async def measure(pair: Pair, lengths: Sequence[int], rounds: int) -> dict[int, Times]:
    """Interleaved: each length alone and pushed, in turns of either order, and once more with its KV all there."""
    times = {length: Times() for length in lengths}
    serial = itertools.count(1)
    await pair.hand_off(prompt(next(serial), 300), push=True)
    for number in range(rounds):
        for length, each in times.items():
            ids = prompt(next(serial), length)
            turns = [(each.alone, prompt(next(serial), length), False), (each.ready, ids, True)]
            for into, tokens, push in turns if number % 2 else reversed(turns):
                await pair.hand_off(tokens, push=push)
                into.append(pair.compute_s + (pair.exposed_s if push else 0.0))
                if push:
                    each.exposed.append(pair.exposed_s)
            await pair.hand_off(ids, push=True)  # the prefill worker has it in its cache; decode keeps none
            each.whole.append(pair.compute_s + pair.exposed_s)  # of one block: the rest is there, and leaves at once
    return times


@contextmanager
def slow_link() -> Iterator[None]:
    """A namespace that is reached over a link of LINK_RATE. Raises RuntimeError saying what is missing."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise RuntimeError("needs root, and ip and tc of iproute2")
    inside = ("ip", "netns", "exec", NETNS)
    limit = ("root", "tbf", "rate", LINK_RATE, "burst", "2mb", "latency", "50ms")
    try:
        _do("ip", "netns", "add", NETNS)
        _do("ip", "link", "add", "pdmesh-b0", "type", "veth", "peer", "name", "pdmesh-b1", "netns", NETNS)
        _do("ip", "addr", "add", f"{HERE}/30", "dev", "pdmesh-b0")
        _do("ip", "link", "set", "pdmesh-b0", "up")
        _do(*inside, "ip", "addr", "add", f"{THERE}/30", "dev", "pdmesh-b1")
        _do(*inside, "ip", "link", "set", "pdmesh-b1", "up")
        _do(*inside, "ip", "link", "set", "lo", "up")
        _do("tc", "qdisc", "add", "dev", "pdmesh-b0", *limit)
        _do(*inside, "tc", "qdisc", "add", "dev", "pdmesh-b1", *limit)
        yield
    finally:
        subprocess.run(("ip", "link", "del", "pdmesh-b0"), check=False, capture_output=True)
        subprocess.run(("ip", "netns", "del", NETNS), check=False, capture_output=True)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@asynccontextmanager
async def running(model: Path, link: Link) -> AsyncIterator[Pair]:
    """Both workers; the prefill worker sits behind the slow link if there is one."""
    common = ("--model", str(model), "--model-name", "bench", "--max-context", "4200", "--transports", link.transport)
    prefill_argv = [sys.executable, "-m", "prefill_service", *common, "--num-blocks", "1400"]
    decode_argv = [sys.executable, "-m", "decode_service", *common, "--num-blocks", "1400", "--grace-s", "60"]
    decode_argv += ["--no-prefix-caching", "--lease-s", "30", "--num-threads", "1"]
    async with AsyncExitStack() as stack:
        if link.is_remote:
            stack.enter_context(slow_link())
            prefill_argv = ["ip", "netns", "exec", NETNS, *prefill_argv, "--host", THERE]
            decode_argv += ["--host", HERE]
        addresses = []
        for name, argv in (("prefill", prefill_argv), ("decode", decode_argv)):
            process = ManagedProcess(name, argv)
            stack.push_async_callback(process.stop)
            await process.start(timeout_s=120)
            addresses.append(process.address)
        yield Pair(stack, addresses[0], addresses[1])


def exposed_figures(rounds: int) -> list[Figure]:
    """On SmolLM2, over every link."""
    return asyncio.run(measure_links(ensure_model(DEFAULT_MODEL), rounds))


async def measure_links(model: Path, rounds: int, lengths: Sequence[int] = LENGTHS) -> list[Figure]:
    """For each link and prompt length: the ratio with its goal; beside it what the whole transfer would have cost."""
    figures = []
    for link in LINKS:
        try:
            async with running(model, link) as pair:
                times = await measure(pair, lengths, rounds)
        except RuntimeError as error:
            say(f"{link.name}: left out: {error}")
            continue
        for length, each in times.items():
            figures += _figures_of(link, length, each)
    return figures


def _figures_of(link: Link, length: int, times: Times) -> list[Figure]:
    alone, ready = statistics.median(times.alone), statistics.median(times.ready)
    # Of each round, whose prefills ran one after the other: a machine that gets slower strikes both.
    ratio = Spread.of(ready / alone for alone, ready in zip(times.alone, times.ready, strict=True))
    exposed, whole = statistics.median(times.exposed), statistics.median(times.whole)
    name = f"{link.name}, {length} tokens"
    say(f"{name}: alone {alone:.4f} s, ready {ready:.4f} s, exposed {exposed * 1e3:.2f} ms, whole {whole * 1e3:.2f} ms")
    return [
        Figure(
            f"{name}: prefill to decode ready / prefill alone", ratio.median, "x", "lower", goal=link.goal, peer=ratio.in_words
        ),
        Figure(f"{name}: the same if all KV were sent after the prefill", (alone + whole) / alone, "x", "lower"),
        Figure(f"{name}: exposed transfer", exposed * 1e3, "ms", "lower", limit=whole * 1e3),
    ]
