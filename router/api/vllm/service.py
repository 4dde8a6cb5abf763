"""`vllm.grpc.engine.VllmEngine`: thin handlers around the frontend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pdmesh.runtime.errors import FailedPrecondition, MeshError, Unimplemented
from pdmesh.third_party.vllm import smg_common_pb2 as common_pb
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineServicer
from router.api import request_metadata
from router.api.frontend import Frontend
from router.api.protocol_errors import renamed
from router.api.validation import refuse
from router.api.vllm import archive, info
from router.api.vllm.requests import NAMES, to_mesh
from router.api.vllm.responses import Answer
from router.api.vllm.running import AbortedByCaller, Running
from router.tokenization.served_model import ServedModel

if TYPE_CHECKING:
    from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import _ServicerContext

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"


class VllmEngineService(VllmEngineServicer):
    """The one model of a router, as one engine."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._running = Running()
        self._started_at = time.monotonic()
        self._last_request_at = 0.0
        self._tokenizer: list[common_pb.GetTokenizerChunk] = []

    async def Generate(self, request: pb.GenerateRequest, context: _ServicerContext) -> AsyncGenerator[pb.GenerateResponse, None]:
        self._model()
        self._last_request_at = time.time()
        message = to_mesh(request)
        request_metadata.fill(message.options, context.invocation_metadata() or ())
        answer = Answer(request)
        with self._running.enter(request.request_id) as run:
            try:
                time_left_s, metadata = context.time_remaining(), context.invocation_metadata()
                async with aclosing(self._frontend.generate(message, time_left_s, metadata=metadata)) as messages:
                    while (event := await run.next(messages)) is not None:
                        for response in answer.responses(event):
                            yield response
            except MeshError as error:
                raise renamed(error, NAMES) from error
            except AbortedByCaller:
                for response in answer.aborted():
                    yield response

    async def Abort(self, request: pb.AbortRequest, context: _ServicerContext) -> pb.AbortResponse:
        for request_id in request.request_ids:
            self._running.abort(request_id)
        return pb.AbortResponse()

    async def Embed(self, request: pb.EmbedRequest, context: _ServicerContext) -> pb.EmbedResponse:
        _unimplemented("Embed: this mesh generates text, it makes no embeddings")

    async def FlushCache(self, request: common_pb.FlushCacheRequest, context: _ServicerContext) -> common_pb.FlushCacheResponse:
        _unimplemented("FlushCache: prefix caches belong to the workers, and their blocks are evicted when room is needed")

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: _ServicerContext) -> pb.HealthCheckResponse:
        healthy = self._frontend.is_ready
        return pb.HealthCheckResponse(healthy=healthy, message="ready" if healthy else "no decode worker is reachable")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: _ServicerContext) -> pb.GetModelInfoResponse:
        model = self._model()
        return info.model_info(model, self._folder(model), self._frontend.core.max_context(model))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _ServicerContext) -> pb.GetServerInfoResponse:
        return info.server_info(
            self._frontend.status(),
            self._model().name,
            uptime_s=time.monotonic() - self._started_at,
            last_request_at=self._last_request_at,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: _ServicerContext) -> pb.GetLoadsResponse:
        if request.dp_rank:
            refuse("dp_rank", f"{request.dp_rank} does not exist: there is rank 0")
        return info.loads(self._frontend.status(), self._model().name)

    async def GetTokenizer(
        self, request: common_pb.GetTokenizerRequest, context: _ServicerContext
    ) -> AsyncGenerator[common_pb.GetTokenizerChunk, None]:
        model = self._model()
        if not self._tokenizer:
            self._tokenizer = await asyncio.to_thread(archive.archive_chunks, self._folder(model))
        for chunk in self._tokenizer:
            yield chunk

    def _model(self) -> ServedModel:
        models = self._frontend.core.models
        if len(models) != 1:
            raise FailedPrecondition(
                "model",
                f"this protocol names no model and the router serves {', '.join(sorted(models))}; start one more router with "
                "one --models for each gateway",
            )
        return next(iter(models.values()))

    def _folder(self, model: ServedModel) -> Path:
        return Path(self._frontend.core.config.model_folders()[model.name])


def _unimplemented(message: str) -> NoReturn:
    raise Unimplemented(message)
