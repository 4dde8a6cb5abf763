"""A server whose latencies are known exactly, for the load test: `python -m tests.support.loadtest_stub grpc|http`.

The latencies of request number i (the number within its id) are drawn from a distribution with a seed, so whoever has the seed
knows the true latency of every request. With a stall, nothing leaves the server from `stall_at_s` (seconds after the arrival of
the first request) on for `stall_s` seconds: what falls due within leaves at its end, and what arrives within begins then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pdmesh.v1 import mesh_pb2, worker_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshServicer, add_MeshServicer_to_server

MODEL = "stub"
MAX_CONTEXT = 32_768
_NUMBER = re.compile(r"-(\d+)-\d+$")


@dataclass(frozen=True)
class Latencies:
    """Lognormal TTFT and a gap between tokens, in seconds, that are the same for request i wherever they are drawn."""

    seed: int = 1
    ttft_s: float = 0.2
    sigma: float = 0.5
    gap_s: float = 0.02
    stall_at_s: float = math.inf
    stall_s: float = 0.0

    def ttft(self, number: int) -> float:
        """Without a stall."""
        return self.ttft_s * math.exp(self.sigma * random.Random(f"{self.seed}/{number}").gauss(0, 1))

    def delayed(self, at_s: float) -> float:
        """When what falls due at `at_s` (since the first arrival) leaves."""
        return self.stall_at_s + self.stall_s if self.stall_at_s <= at_s < self.stall_at_s + self.stall_s else at_s

    def token_times(self, number: int, arrived_s: float, num_tokens: int) -> list[float]:
        """When the tokens of request `number` leave. All times are seconds since the first arrival."""
        first_s = self.delayed(arrived_s) + self.ttft(number)
        return [self.delayed(first_s + index * self.gap_s) for index in range(num_tokens)]


class Stub:
    """The clock that both servers share. `started`: the monotonic time of the first arrival. `left`: by request number, when its
    first and its last token left, by the same clock."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self.started: float | None = None
        self.left: dict[int, tuple[float, float]] = {}
        self.num_running = 0

    async def tokens(self, request_id: str, num_tokens: int) -> AsyncGenerator[int, None]:
        """Token numbers, each when it is due."""
        now = time.monotonic()
        if self.started is None:
            self.started = now
        match = _NUMBER.search(request_id)
        number = int(match[1]) if match else 0
        self.num_running += 1
        try:
            for index, at_s in enumerate(self._latencies.token_times(number, now - self.started, num_tokens)):
                await asyncio.sleep(max(0.0, self.started + at_s - time.monotonic()))
                left_s = time.monotonic()
                self.left[number] = (self.left[number][0] if index else left_s, left_s)
                yield index
        finally:
            self.num_running -= 1


class StubMesh(MeshServicer):
    """The mesh's API."""

    Embed = LoadAdapter = UnloadAdapter = ListAdapters = ReleaseSession = UpdateWeights = None  # type: ignore[assignment]
    SetTrafficSplit = SetServing = SendWeights = None  # type: ignore[assignment]

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    async def Generate(
        self, request: mesh_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        num_tokens = request.sampling.max_tokens
        yield mesh_pb2.GenerateResponse(started=mesh_pb2.Started(request_id=request.options.request_id, seed=1, model=MODEL))
        async with aclosing(self._stub.tokens(request.options.request_id, num_tokens)) as numbers:
            async for index in numbers:
                yield mesh_pb2.GenerateResponse(delta=mesh_pb2.Delta(first_index=index, token_ids=[1000 + index], text="word "))
        usage = mesh_pb2.Usage(prompt_tokens=len(request.tokens.ids), completion_tokens=num_tokens)
        yield mesh_pb2.GenerateResponse(completed=mesh_pb2.Completed(usage=usage))

    async def ListModels(
        self, request: mesh_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> mesh_pb2.ListModelsResponse:
        return mesh_pb2.ListModelsResponse(models=[mesh_pb2.ModelInfo(name=MODEL, max_context=MAX_CONTEXT)])

    Explain = None  # type: ignore[assignment]

    async def GetStatus(
        self, request: mesh_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> mesh_pb2.GetStatusResponse:
        info = worker_pb2.WorkerInfo(worker_id="stub-0", roles=[worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE])
        return mesh_pb2.GetStatusResponse(router_id="stub", workers=[mesh_pb2.WorkerStatus(info=info, alive=True)])

    Chat = Tokenize = None  # type: ignore[assignment]


class StubHttp(asyncio.Protocol):
    """A connection that speaks just enough HTTP/1.1 and OpenAI: /models, /completions and /chat/completions, streamed."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._received = b""
        self._answer: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._answer.cancel()

    def data_received(self, data: bytes) -> None:
        """One request at a time: nobody sends the next one before the last is answered."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in head.split(b"\r\n")[1:])}
        if end and len(body) == int(headers.get(b"content-length", b"0")):
            self._received = b""
            self._answer = asyncio.create_task(self._reply(head, headers.get(b"x-request-id", b"").decode(), body))

    async def _reply(self, head: bytes, request_id: str, body: bytes) -> None:
        write = self._transport.write
        if head.startswith(b"GET /v1/models "):
            text = json.dumps({"data": [{"id": MODEL, "max_model_len": MAX_CONTEXT}]}).encode()
            write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            return
        request = json.loads(body)
        write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = {"delta": {"content": "word "}} if "messages" in request else {"text": "word "}
        token = _event({"choices": [{"index": 0, **piece}]})
        with_ids = request.get("return_token_ids", False) and "messages" not in request
        async with aclosing(self._stub.tokens(request_id, request["max_tokens"])) as numbers:
            async for number in numbers:
                write(_event({"choices": [{"index": 0, **piece, "token_ids": [1000 + number]}]}) if with_ids else token)
        usage = {"prompt_tokens": len(request.get("prompt", ())), "completion_tokens": request["max_tokens"]}
        write(_event({"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _event(value: object) -> bytes:
    return _chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve_grpc(stub: Stub) -> tuple[grpc.aio.Server, str]:
    """A running server and its address."""
    # As a router: the client's keepalive pings are no abuse.
    server = grpc.aio.server(
        options=[("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_ping_interval_without_data_ms", 1000)]
    )
    add_MeshServicer_to_server(StubMesh(stub), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def serve_http(stub: Stub) -> tuple[asyncio.Server, str]:
    """A running server and its base URL."""
    server = await asyncio.get_running_loop().create_server(lambda: StubHttp(stub), "127.0.0.1", 0, backlog=4096)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def main(kind: str, latencies: Latencies) -> None:
    """Serves until standard input ends, then prints when the first request arrived, and in the next line `Stub.left`."""
    stub = Stub(latencies)
    server, address = await (serve_grpc(stub) if kind == "grpc" else serve_http(stub))
    print(address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(stub.started, json.dumps(stub.left), sep="\n", flush=True)
    if isinstance(server, asyncio.Server):
        server.close()
    else:
        await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("grpc", "http"))
    parser.add_argument("--latencies", type=json.loads, default={})
    given = parser.parse_args()
    asyncio.run(main(given.kind, Latencies(**given.latencies)))
