"""What a router is measured against: a grpc.aio server alone, without anything behind it. `python -m benchmarks.router.peer`.

It speaks pdmesh.v1.Mesh/Generate and does the least that can be done: parses the request, writes messages that were made before.
Its streams are paced by one clock that wakes all of them, as a frame of a decode worker wakes all streams of a router: the
cheapest feed there is. (A timer for each stream costs more: `--own-timers`.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, prefill_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshServicer, add_MeshServicer_to_server

STARTED = mesh_pb2.GenerateResponse(started=mesh_pb2.Started(request_id="0123456789abcdef", seed=1, model="stub"))
DELTA = mesh_pb2.GenerateResponse(delta=mesh_pb2.Delta(first_index=100, token_ids=[65], text="b"))
COMPLETED = mesh_pb2.GenerateResponse(completed=mesh_pb2.Completed())


class Clock:
    """Wakes everybody who waits, every `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> asyncio.Future[None]:
        """Until the next tick."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return waiter

    async def run(self) -> None:
        """Tick for ever, at the same rate however long the streams take."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)


class EmptyStream(MeshServicer):
    """`started` and the first token at once, then one message per tick."""

    Embed = LoadAdapter = UnloadAdapter = ListAdapters = ReleaseSession = UpdateWeights = None  # type: ignore[assignment]
    SetTrafficSplit = SetServing = SendWeights = None  # type: ignore[assignment]

    def __init__(self, step_s: float, clock: Clock | None) -> None:
        self._step_s = step_s
        self._clock = clock

    async def Generate(
        self, request: mesh_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        """As many deltas as asked for."""
        yield STARTED
        yield DELTA
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(1, request.sampling.max_tokens):
            if self._clock is not None:
                await self._clock.wait()
            elif self._step_s:
                await asyncio.sleep(began + number * self._step_s - loop.time())
            yield DELTA
        yield COMPLETED

    Chat = Tokenize = ListModels = GetStatus = Explain = None  # type: ignore[assignment]


# The least that a router over grpc.aio can be: `python -m benchmarks.router.peer --workers DECODE,PREFILL --mode remote|local`.
#
# For each request it makes the router's calls to the workers, one after the other, with messages that were made before, and
# parses nothing. What it adds to a server that answers by itself is gRPC's share of what a router adds. LOCAL is the Submit
# call alone: the first token, which follows in a frame of its own, is not waited for.


PROMPT = common_pb2.TokenRequest(
    model="stub", prompt_token_ids=[65] * 128, sampling=common_pb2.SamplingParams(seed=1, max_tokens=1)
)
SUBMIT = decode_pb2.SubmitRequest(request_id="relayed", attempt=1, mode=mesh_pb2.PREFILL_MODE_REMOTE, request=PROMPT)
PREFILL = prefill_pb2.PrefillRequest(request_id="relayed", request=PROMPT)


class Relay(MeshServicer):
    """`started`, the workers' answers, then the deltas that were asked for."""

    Embed = LoadAdapter = UnloadAdapter = ListAdapters = ReleaseSession = UpdateWeights = None  # type: ignore[assignment]
    SetTrafficSplit = SetServing = SendWeights = None  # type: ignore[assignment]

    def __init__(self, decode: grpc.aio.Channel, prefill: grpc.aio.Channel | None) -> None:
        self._submit: Any = decode.unary_unary("/pdmesh.v1.DecodeService/Submit")
        self._prefill: Any = None if prefill is None else prefill.unary_stream("/pdmesh.v1.PrefillService/Prefill")
        self._messages = SUBMIT.SerializeToString(), PREFILL.SerializeToString()

    async def Generate(
        self, request: mesh_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        """The first delta follows the first message of the last call."""
        yield STARTED
        submit, prefill = self._messages
        await self._submit(submit)
        if self._prefill is not None:
            events = self._prefill(prefill)
            await events.read()
            events.cancel()  # an unread call holds its stream, and a connection has so many
        for _ in range(request.sampling.max_tokens):
            yield DELTA
        yield COMPLETED

    Chat = Tokenize = ListModels = GetStatus = Explain = None  # type: ignore[assignment]


async def serve(servicer: MeshServicer, clock: Clock | None = None) -> None:
    """Until it is killed."""
    server = grpc.aio.server()
    add_MeshServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"ready": True, "address": f"127.0.0.1:{port}"}), flush=True)
    await (clock.run() if clock is not None else server.wait_for_termination())


async def main(given: argparse.Namespace) -> None:
    if given.workers:
        decode, prefill = (grpc.aio.insecure_channel(address) for address in given.workers.split(","))
        await serve(Relay(decode, prefill if given.mode == "remote" else None))
        return
    clock = None if given.own_timers or not given.step_s else Clock(given.step_s)
    await serve(EmptyStream(given.step_s, clock), clock)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--own-timers", action="store_true")
    parser.add_argument("--workers", help="be a relay to these two: DECODE,PREFILL")
    parser.add_argument("--mode", choices=("remote", "local"), default="remote")
    asyncio.run(main(parser.parse_args()))
