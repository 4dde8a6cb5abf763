"""A Mesh servicer with a script instead of a mesh: what the client library is tested against."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio

from pdmesh.runtime.errors import MeshError, status_of
from pdmesh.runtime.telemetry.propagation import SpanContext, extract
from pdmesh.v1 import common_pb2, mesh_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshServicer, add_MeshServicer_to_server

NUM_TOKENS = 12
SEED = 7
FINGERPRINT = "fp_0123456789abcdef"


def token(choice: int, index: int) -> int:
    """The token that a fake model draws: a function of choice and index, as the real one's is of the seed too."""
    return 100 * choice + index


def text(choice: int, index: int) -> str:
    return f"<{choice}.{index}>"


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass
class Script:
    """What a fake router does with its next calls."""

    # Stop with `failure` after so many tokens of a call; None: never.
    fail_after: int | None = None
    failure: MeshError | None = None
    # How many calls fail like that; later ones succeed.
    num_failures: int = 1
    # Wait forever after so many tokens.
    hang_after: int | None = None
    # Send these messages instead of a stream of tokens.
    messages: Sequence[mesh_pb2.GenerateResponse] | None = None
    workers: Sequence[mesh_pb2.WorkerStatus] = ()
    requests: list[mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest] = field(default_factory=list)
    release_failure: MeshError | None = None
    released: list[mesh_pb2.ReleaseSessionRequest] = field(default_factory=list)
    time_left_s: list[float | None] = field(default_factory=list)
    callers: list[SpanContext | None] = field(default_factory=list)  # as the metadata say
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    complete: bool = False

    def ended(self, ctx: Context) -> None:
        """The call is over, for whatever reason."""
        if not self.complete:
            self.cancelled.set()


class FakeMesh(MeshServicer):
    Embed = LoadAdapter = UnloadAdapter = ListAdapters = UpdateWeights = None  # type: ignore[assignment]
    SetTrafficSplit = SetServing = SendWeights = None  # type: ignore[assignment]

    def __init__(self, script: Script) -> None:
        self.script = script

    async def Generate(self, request: mesh_pb2.GenerateRequest, context: Context) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        async for response in self._serve(request, context):
            yield response

    async def Chat(self, request: mesh_pb2.ChatRequest, context: Context) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        async for response in self._serve(request, context):
            yield response

    async def Tokenize(self, request: mesh_pb2.TokenizeRequest, context: Context) -> mesh_pb2.TokenizeResponse:
        await self._fail_if_due(context, 0)
        return mesh_pb2.TokenizeResponse(token_ids=list(request.text.encode()), max_context=64)

    async def ListModels(self, request: mesh_pb2.ListModelsRequest, context: Context) -> mesh_pb2.ListModelsResponse:
        model = mesh_pb2.ModelInfo(name="fake", max_context=64, num_prefill_workers=1, num_decode_workers=2)
        return mesh_pb2.ListModelsResponse(models=[model])

    Explain = None  # type: ignore[assignment]

    async def ReleaseSession(self, request: mesh_pb2.ReleaseSessionRequest, context: Context) -> mesh_pb2.ReleaseSessionResponse:
        self.script.released.append(request)
        if self.script.release_failure is not None:
            raise self.script.release_failure
        return mesh_pb2.ReleaseSessionResponse(num_blocks=7, num_workers=2, num_unreachable=1)

    async def GetStatus(self, request: mesh_pb2.GetStatusRequest, context: Context) -> mesh_pb2.GetStatusResponse:
        return mesh_pb2.GetStatusResponse(router_id="fake-router", max_inflight=4, workers=self.script.workers)

    async def _serve(
        self, request: mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        script = self.script
        script.requests.append(request)
        script.time_left_s.append(context.time_remaining())
        script.callers.append(extract(context.invocation_metadata() or ()))
        context.add_done_callback(script.ended)  # type: ignore[arg-type]  # the stubs name a class where a function goes
        if script.messages is not None:
            for message in script.messages:
                yield message
            return
        await self._fail_if_due(context, 0)
        seed = request.resume.seed if request.HasField("resume") else SEED
        yield mesh_pb2.GenerateResponse(
            started=mesh_pb2.Started(request_id=request.options.request_id or "made-up", seed=seed, model="fake")
        )
        async for response in self._tokens(request, context):
            yield response
        yield mesh_pb2.GenerateResponse(completed=_completed(request))
        script.complete = True

    async def _tokens(
        self, request: mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        given = {choice.index: len(choice.token_ids) for choice in request.resume.emitted}
        num_sent = 0
        for index in range(NUM_TOKENS):
            for choice in range(max(1, request.sampling.n)):
                if index < given.get(choice, 0):
                    continue
                if num_sent == self.script.hang_after:
                    await asyncio.Event().wait()
                message = delta(choice, index)
                message.system_fingerprint = "" if num_sent else FINGERPRINT
                yield mesh_pb2.GenerateResponse(delta=message)
                num_sent += 1
                await self._fail_if_due(context, num_sent)

    async def _fail_if_due(self, context: Context, num_sent: int) -> None:
        script = self.script
        if script.failure is not None and script.num_failures > 0 and num_sent == (script.fail_after or 0):
            script.num_failures -= 1
            status = status_of(script.failure)
            await context.abort(status.code, status.message, status.trailing_metadata)


def delta(choice: int, index: int) -> mesh_pb2.Delta:
    last = index == NUM_TOKENS - 1
    reason = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
    return mesh_pb2.Delta(
        choice=choice, first_index=index, token_ids=[token(choice, index)], text=text(choice, index), finish_reason=reason
    )


def _completed(request: mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest) -> mesh_pb2.Completed:
    num_tokens = NUM_TOKENS * max(1, request.sampling.n)
    return mesh_pb2.Completed(
        usage=mesh_pb2.Usage(prompt_tokens=3, completion_tokens=num_tokens),
        timings=mesh_pb2.Timings(ttft_ns=10, route_ns=4, prefill_compute_ns=6, mode=mesh_pb2.PREFILL_MODE_REMOTE),
    )


@dataclass
class FakeRouter:
    """A served FakeMesh."""

    script: Script
    address: str
    server: grpc.aio.Server

    async def stop(self) -> None:
        await self.server.stop(None)


async def start_router(script: Script | None = None, port: int = 0) -> FakeRouter:
    script = script or Script()
    server = grpc.aio.server()
    add_MeshServicer_to_server(FakeMesh(script), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return FakeRouter(script, f"127.0.0.1:{port}", server)
