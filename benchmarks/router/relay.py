"""The least that a router over grpc.aio can be: `python -m benchmarks.router.relay --workers DECODE,PREFILL --mode remote|local`.

For each request it makes the router's calls to the workers, one after the other, with messages that were made before, and parses
nothing. What it adds to a server that answers by itself (`peer.py`) is gRPC's share of what a router adds. LOCAL is the Submit
call alone: the first token, which follows in a frame of its own, is not waited for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from benchmarks.router.peer import COMPLETED, DELTA, STARTED
from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, prefill_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshServicer, add_MeshServicer_to_server

PROMPT = common_pb2.TokenRequest(
    model="stub", prompt_token_ids=[65] * 128, sampling=common_pb2.SamplingParams(seed=1, max_tokens=1)
)
SUBMIT = decode_pb2.SubmitRequest(request_id="relayed", attempt=1, mode=mesh_pb2.PREFILL_MODE_REMOTE, request=PROMPT)
PREFILL = prefill_pb2.PrefillRequest(request_id="relayed", request=PROMPT)


class Relay(MeshServicer):
    """`started`, the workers' answers, then the deltas that were asked for."""

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


async def main(workers: str, mode: str) -> None:
    """Until it is killed."""
    decode, prefill = (grpc.aio.insecure_channel(address) for address in workers.split(","))
    server = grpc.aio.server()
    add_MeshServicer_to_server(Relay(decode, prefill if mode == "remote" else None), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"ready": True, "address": f"127.0.0.1:{port}"}), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", required=True)
    parser.add_argument("--mode", choices=("remote", "local"), default="remote")
    given = parser.parse_args()
    asyncio.run(main(given.workers, given.mode))
