"""The load: raw gRPC, so that the client costs little. `python -m benchmarks.router.client paced|closed|streams`; JSON lines out.

Requests are bytes made before and answers are not parsed, but for their count: message 0 is `started`, message 1 the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio

from pdmesh.v1 import common_pb2, mesh_pb2

METHOD = "/pdmesh.v1.Mesh/Generate"
MODES = {"local": mesh_pb2.PREFILL_MODE_LOCAL, "remote": mesh_pb2.PREFILL_MODE_REMOTE}
Call = Callable[[], "grpc.aio.UnaryStreamCall[bytes, bytes]"]
CALLS_PER_CONNECTION = 100
MAX_OPENING = 64
"""Streams that wait for their first token at the same time."""
FIRST_TOKEN = 2
"""Which message of an answer it is in."""


def request_of(mode: str, prompt_tokens: int, max_tokens: int) -> bytes:
    """Serialized once: every request is the same."""
    return mesh_pb2.GenerateRequest(
        tokens=mesh_pb2.TokenIds(ids=[65 + number % 26 for number in range(prompt_tokens)]),
        sampling=common_pb2.SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True),
        options=mesh_pb2.RequestOptions(mode=MODES[mode]),
    ).SerializeToString()


def requests_of(texts: Path, mode: str, max_tokens: int) -> list[bytes]:
    """One for each of the texts in a file of JSON."""
    sampling = common_pb2.SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    options = mesh_pb2.RequestOptions(mode=MODES[mode])
    return [
        mesh_pb2.GenerateRequest(text=text, sampling=sampling, options=options).SerializeToString()
        for text in json.loads(texts.read_text())
    ]


def caller(channel: grpc.aio.Channel, *requests: bytes) -> Call:
    """Starts one call, with the requests in turn."""
    generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
    turns = itertools.cycle(requests)
    return lambda: generate(next(turns))


async def ttft_of(call: Call) -> float:
    """Seconds from the call to its first token; reads to the end."""
    began = time.perf_counter()
    first_s = 0.0
    count = 0
    async for _ in call():
        count += 1
        if count == FIRST_TOKEN:
            first_s = time.perf_counter() - began
    return first_s


async def paced(call: Call, rate: float, seconds: float) -> dict[str, object]:
    """An open loop at a steady rate: TTFT of each request, in seconds, from when it was sent."""
    began, running = time.perf_counter(), list[asyncio.Task[float]]()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        running.append(asyncio.create_task(ttft_of(call)))
    return {"ttft_s": await asyncio.gather(*running)}


async def closed(call: Call, clients: int, seconds: float, most: int | None = None) -> dict[str, object]:
    """As many requests as `clients` that never pause get through, but no more than `most`: requests/s."""
    until = time.perf_counter() + seconds
    places = itertools.count() if most is None else iter(range(most))

    async def one() -> int:
        count = 0
        while time.perf_counter() < until and next(places, None) is not None:
            await ttft_of(call)
            count += 1
        return count

    began = time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(clients)))
    return {"requests_per_s": sum(counts) / (time.perf_counter() - began), "requests": sum(counts)}


class Streams:
    """Many streams that stay open. `num_messages` of all of them so far."""

    def __init__(self, address: str, request: bytes, count: int) -> None:
        channels = [_channel(address) for _ in range(-(-count // CALLS_PER_CONNECTION))]
        self._calls = [caller(channel, request) for channel in channels]
        self._count = count
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._readers: list[asyncio.Task[None]] = []
        self.num_messages = 0

    @property
    def num_running(self) -> int:
        """Streams that have not ended."""
        return sum(not reader.done() for reader in self._readers)

    async def open(self) -> None:
        """Until each has its first token. Raises what ended one of them before."""
        loop = asyncio.get_running_loop()
        begun = [loop.create_future() for _ in range(self._count)]
        for number, first in enumerate(begun):
            await self._opening.acquire()
            self._readers.append(asyncio.create_task(self._read(self._calls[number % len(self._calls)], first)))
        await asyncio.gather(*begun)

    async def _read(self, call: Call, begun: asyncio.Future[None]) -> None:
        try:
            count = 0
            async for _ in call():
                self.num_messages += 1
                count += 1
                if count == FIRST_TOKEN:
                    begun.set_result(None)
                    self._opening.release()
        except grpc.aio.AioRpcError as error:
            if begun.done():
                raise
            begun.set_exception(error)
            self._opening.release()


async def streams(address: str, request: bytes, count: int) -> None:
    """Opens `count` streams and says so, then a line with the messages so far for each line of standard input."""
    opened = Streams(address, request, count)
    await opened.open()
    say({"begun": count})
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        say({"messages": opened.num_messages, "running": opened.num_running})


def _channel(address: str) -> grpc.aio.Channel:
    # Without pools of their own channels share one connection.
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def say(content: dict[str, object]) -> None:
    """One line of JSON."""
    print(json.dumps(content), flush=True)


async def main(given: argparse.Namespace) -> None:
    """One measurement."""
    if given.texts is not None:
        requests = requests_of(given.texts, given.mode, given.max_tokens)
        async with _channel(given.address) as channel:
            say(await closed(caller(channel, *requests), given.count, given.seconds, most=len(requests)))
        return
    request = request_of(given.mode, given.prompt_tokens, given.max_tokens)
    if given.what == "streams":
        await streams(given.address, request, given.count)
        return
    async with _channel(given.address) as channel:
        call = caller(channel, request)
        await asyncio.gather(*(ttft_of(call) for _ in range(16)))
        measure: Awaitable[dict[str, object]]
        measure = paced(call, given.rate, given.seconds) if given.what == "paced" else closed(call, given.count, given.seconds)
        say(await measure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("paced", "closed", "streams"))
    parser.add_argument("--address", required=True)
    parser.add_argument("--mode", choices=tuple(MODES), default="remote")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--texts", type=Path, help="closed: prompts from this file in place of token ids, each once")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    asyncio.run(main(parser.parse_args()))
