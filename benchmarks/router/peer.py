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

from pdmesh.v1 import mesh_pb2
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


async def main(step_s: float, own_timers: bool) -> None:
    """Until it is killed."""
    clock = None if own_timers or not step_s else Clock(step_s)
    server = grpc.aio.server()
    add_MeshServicer_to_server(EmptyStream(step_s, clock), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"ready": True, "address": f"127.0.0.1:{port}"}), flush=True)
    await (clock.run() if clock is not None else server.wait_for_termination())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--own-timers", action="store_true")
    given = parser.parse_args()
    asyncio.run(main(given.step_s, given.own_timers))
