"""`inference.GRPCInferenceService`: thin handlers around the frontend, and concurrent requests on one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from pdmesh.runtime.errors import MeshError, NotFound, as_mesh_error, status_of
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from pdmesh.third_party.kserve.grpc_service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.api.frontend import Frontend, RequestMetadata, fill_options
from router.api.kserve import tensors
from router.api.kserve.requests import Ask, check_version
from router.api.kserve.responses import Answer, failed
from router.api.kserve.tensors import VERSION
from router.api.protocol_errors import renamed

if TYPE_CHECKING:
    from pdmesh.third_party.kserve.grpc_service_pb2_grpc import _ServicerContext


# Several requests at once on one stream: responses go out as they come, in order within each request.


# Bounds what one stream holds for a slow client; above it, the bounds of each request apply (max_buffered_tokens).
MAX_READY_RESPONSES = 64
MAX_REQUESTS = 1024
"""Concurrent requests of one stream; further ones are read when one of these has ended."""

Answering = Callable[[pb.ModelInferRequest], AsyncGenerator[pb.ModelInferResponse, None]]


class Many:
    """Serve one stream. `answer` makes the responses of a request, or raises MeshError at once or later."""

    def __init__(self, answer: Answering, *, wants_status: bool) -> None:
        """Create the server of one stream. `wants_status`: the first error ends the stream as its status; else it is the response
        of its request alone."""
        self._answer = answer
        self._wants_status = wants_status
        self._ready: asyncio.Queue[pb.ModelStreamInferResponse | BaseException | None] = asyncio.Queue(MAX_READY_RESPONSES)
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._running: set[asyncio.Task[None]] = set()

    async def responses(self, requests: AsyncIterator[pb.ModelInferRequest]) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Yield responses until the client has sent its last request and every one is answered. When the generator is closed
        early, all requests are cancelled."""
        reading = asyncio.create_task(self._read(requests), name="requests of a stream")
        try:
            while (response := await self._ready.get()) is not None:
                if isinstance(response, BaseException):
                    raise response
                yield response
        finally:
            tasks = {reading, *self._running}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.ModelInferRequest]) -> None:
        try:
            async for request in requests:
                await self._room.acquire()
                task = asyncio.create_task(self._run(request), name="request of a stream")
                self._running.add(task)
                task.add_done_callback(self._done)
            await asyncio.gather(*self._running)
        except Exception as error:  # noqa: BLE001 - it ends the stream, in the task that owns it
            await self._ready.put(error)
        else:
            await self._ready.put(None)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.release()

    async def _run(self, request: pb.ModelInferRequest) -> None:
        try:
            async with aclosing(self._answer(request)) as responses:
                async for response in responses:
                    await self._ready.put(pb.ModelStreamInferResponse(infer_response=response))
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            await self._ready.put(as_mesh_error(error) if self._wants_status else self._failed(request, error))

    def _failed(self, request: pb.ModelInferRequest, error: Exception) -> pb.ModelStreamInferResponse:
        status = status_of(error)
        return failed(request, status.code.name, status.message)


SERVICE_NAME = "inference.GRPCInferenceService"
# A client that sends this key in its metadata wants an error as the status of the call, which ends it.
STATUS_ERRORS = "triton_grpc_error"


def add_services(server: GrpcServer, frontend: Frontend) -> None:
    """Add the protocol's service to a router's gRPC server."""
    server.register(add_GRPCInferenceServiceServicer_to_server, InferenceService(frontend), SERVICE_NAME)


class InferenceService(GRPCInferenceServiceServicer):
    """Serve each model of the router as one "model" of the protocol."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def ServerLive(self, request: pb.ServerLiveRequest, context: _ServicerContext) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: _ServicerContext) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._frontend.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: _ServicerContext) -> pb.ModelReadyResponse:
        known = request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=known and self._ready().get(request.name, False))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: _ServicerContext) -> pb.ServerMetadataResponse:
        return tensors.server()

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: _ServicerContext) -> pb.ModelMetadataResponse:
        self._check_model(request.name, request.version)
        return tensors.model(request.name)

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: _ServicerContext) -> pb.ModelConfigResponse:
        self._check_model(request.name, request.version)
        return pb.ModelConfigResponse(config=tensors.config(request.name))

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: _ServicerContext) -> pb.RepositoryIndexResponse:
        index = pb.RepositoryIndexResponse()
        for name, ready in self._ready().items():
            if ready:
                index.models.add(name=name, version=VERSION, state="READY")
            elif not request.ready:
                index.models.add(name=name, version=VERSION, state="UNAVAILABLE", reason="no worker that decodes it is reachable")
        return index

    async def ModelInfer(self, request: pb.ModelInferRequest, context: _ServicerContext) -> pb.ModelInferResponse:
        ask = Ask.read(request, can_stream=False)
        fill_options(ask.message.options, context.invocation_metadata() or ())
        metadata = context.invocation_metadata()
        async with aclosing(self._responses(ask, context.time_remaining(), metadata)) as responses:
            return await anext(responses)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: _ServicerContext
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        wants_status = any(key == STATUS_ERRORS and value == "true" for key, value in context.invocation_metadata() or ())

        def answer(request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelInferResponse, None]:
            ask = Ask.read(request, can_stream=True)
            fill_options(ask.message.options, context.invocation_metadata() or ())
            return self._responses(ask, context.time_remaining(), context.invocation_metadata())

        async with aclosing(Many(answer, wants_status=wants_status).responses(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def _responses(
        self, ask: Ask, time_left_s: float | None, metadata: RequestMetadata | None
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """Yield one response for each piece, or one for the whole output."""
        answer = Answer(ask)
        try:
            async with aclosing(self._messages(ask, time_left_s, metadata)) as messages:
                async for message in messages:
                    if not ask.streamed:
                        answer.take(message)
                    elif (response := answer.piece(message)) is not None:
                        yield response
        except MeshError as error:
            raise renamed(error, ask.names) from error
        if not ask.streamed:
            yield answer.whole()
            if ask.empty_final:
                yield answer.empty_final()

    def _messages(
        self, ask: Ask, time_left_s: float | None, metadata: RequestMetadata | None
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        limits = [limit for limit in (ask.timeout_s, time_left_s) if limit is not None]
        limit = min(limits, default=None)
        if isinstance(ask.message, mesh_pb2.ChatRequest):
            return self._frontend.chat(ask.message, limit, metadata=metadata)
        return self._frontend.generate(ask.message, limit, metadata=metadata)

    def _ready(self) -> dict[str, bool]:
        """Return, for each model that is served here, whether a worker decodes it now, or will when it runs again."""
        stopped, is_ready = self._frontend.core.fleet.is_stopped, self._frontend.is_ready
        models = self._frontend.models().models
        return {
            model.name: is_ready and (model.num_decode_workers > 0 or stopped(model.name, worker_pb2.ROLE_DECODE))
            for model in models
        }

    def _check_model(self, name: str, version: str) -> None:
        check_version(version)
        models = self._ready()
        if name not in models:
            raise NotFound(f"name: {name[:100]!r} is not served here; there is {', '.join(sorted(models))}", field="name")
