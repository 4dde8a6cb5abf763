"""`vllm.grpc.engine.VllmEngine`: thin handlers around the frontend, calls that can be aborted by id, and the tokenizer
archive."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import grpc

from pdmesh.runtime.errors import FailedPrecondition, MeshError, Unimplemented
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.third_party.vllm import smg_common_pb2 as common_pb
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import VllmEngineServicer, add_VllmEngineServicer_to_server
from pdmesh.v1 import mesh_pb2
from router.api.frontend import Frontend, fill_options
from router.api.protocol_errors import renamed
from router.api.validation import refuse
from router.api.vllm import kv_events, responses
from router.api.vllm.requests import NAMES, to_mesh
from router.api.vllm.responses import Answer
from router.auth import identity
from router.kv_events.follower import BlockFollower
from router.tokenization.prepared_request import ServedModel

if TYPE_CHECKING:
    from pdmesh.third_party.vllm.vllm_engine_pb2_grpc import _ServicerContext


# Running calls by the caller's id, so that Abort finds them.


class AbortedByCaller(Exception):
    """Report that Abort was called with this request's id."""


class Run:
    """Hold one call of Generate, in its own task."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._waiting = False
        self._aborted = False

    async def next(self, messages: AsyncGenerator[mesh_pb2.GenerateResponse, None]) -> mesh_pb2.GenerateResponse | None:
        """Return the next message; None after the last. Raises AbortedByCaller."""
        if self._aborted:
            raise AbortedByCaller
        self._waiting = True
        try:
            return await anext(messages, None)
        except asyncio.CancelledError:
            if not self._aborted or self._task is None or self._task.uncancel():
                raise  # the client has left, too
            raise AbortedByCaller from None
        finally:
            self._waiting = False

    def abort(self) -> None:
        """End the call: at once where it waits for the mesh, else after the message that it is sending. A task that is cancelled
        while it sends could not give gRPC the status of the call."""
        if self._aborted:
            return
        self._aborted = True
        if self._waiting and self._task is not None:
            self._task.cancel()


class Running:
    """Hold the running calls of Generate, on one event loop. Ids are the callers' own, and each tenant has its own namespace."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str | None, str], Run] = {}

    @contextmanager
    def enter(self, request_id: str) -> Iterator[Run]:
        """Register the calling task while it serves a request; Abort never finds an empty id. Raises MeshError
        (ALREADY_EXISTS)."""
        key = (identity.tenant(), request_id)
        if key in self._runs:
            problem = f"request_id: {request_id[:100]!r} runs already; abort it or choose another"
            raise MeshError(problem, code=grpc.StatusCode.ALREADY_EXISTS, field="request_id")
        run = Run()
        if request_id:
            self._runs[key] = run
        try:
            yield run
        finally:
            self._runs.pop(key, None)

    def abort(self, request_id: str) -> None:
        """Abort a request. One that is not found has ended already, or runs on another router."""
        run = self._runs.get((identity.tenant(), request_id))
        if run is not None:
            run.abort()


# The model's tokenizer files as a zip archive, which a gateway fetches instead of asking a model hub.

CHUNK_BYTES = 256 * 1024
# Files with tokenizers, chat templates and limits; never weights.
_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "*.jinja",
    "*.tiktoken",
)
# A fixed date gives the same bytes for the same files: gateways compare the hash.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(folder: Path) -> bytes:
    """Return the archive of a model folder. Raises OSError."""
    names = sorted({path.name for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (folder / name).read_bytes())
    return buffer.getvalue()


def archive_chunks(folder: Path) -> list[common_pb.GetTokenizerChunk]:
    """Return the archive as messages, in order; the last one carries the hash of the whole. Raises OSError. Slow: call it in a
    thread."""
    archive = pack(folder)
    starts = range(0, len(archive), CHUNK_BYTES)
    messages = [common_pb.GetTokenizerChunk(data=archive[start : start + CHUNK_BYTES]) for start in starts]
    messages[-1].sha256 = hashlib.sha256(archive).hexdigest()
    return messages


SERVICE_NAME = "vllm.grpc.engine.VllmEngine"


def add_services(server: GrpcServer, frontend: Frontend) -> None:
    """Add the protocol's service to a router's gRPC server."""
    server.register(add_VllmEngineServicer_to_server, VllmEngineService(frontend), SERVICE_NAME)


class VllmEngineService(VllmEngineServicer):
    """Serve the one model of a router as one engine."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._running = Running()
        self._started_at = time.monotonic()
        self._last_request_at = 0.0
        self._tokenizer: list[common_pb.GetTokenizerChunk] = []
        self._blocks: BlockFollower | None = None  # from the first subscriber on

    async def Generate(self, request: pb.GenerateRequest, context: _ServicerContext) -> AsyncGenerator[pb.GenerateResponse, None]:
        self._model()
        self._last_request_at = time.time()
        message = to_mesh(request)
        fill_options(message.options, context.invocation_metadata() or ())
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
        return responses.model_info(model, self._folder(model), self._frontend.core.max_context(model))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _ServicerContext) -> pb.GetServerInfoResponse:
        return responses.server_info(
            self._frontend.status(),
            self._model().name,
            uptime_s=time.monotonic() - self._started_at,
            last_request_at=self._last_request_at,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: _ServicerContext) -> pb.GetLoadsResponse:
        if request.dp_rank:
            refuse("dp_rank", f"{request.dp_rank} does not exist: there is rank 0")
        return responses.loads(self._frontend.status(), self._model().name)

    async def GetTokenizer(
        self, request: common_pb.GetTokenizerRequest, context: _ServicerContext
    ) -> AsyncGenerator[common_pb.GetTokenizerChunk, None]:
        model = self._model()
        if not self._tokenizer:
            self._tokenizer = await asyncio.to_thread(archive_chunks, self._folder(model))
        for chunk in self._tokenizer:
            yield chunk

    async def SubscribeKvEvents(
        self, request: common_pb.SubscribeKvEventsRequest, context: _ServicerContext
    ) -> AsyncGenerator[common_pb.KvEventBatch, None]:
        kv_events.check(request)
        if self._blocks is None:
            core = self._frontend.core
            self._blocks = BlockFollower(core.fleet, self._model().name, core.config.prefix_index_blocks)
            self._frontend.closing.append(self._blocks.stop)
        blocks, tenant = self._blocks, identity.tenant() or ""
        stream = kv_events.EventStream(lambda root: blocks.is_plain(root, tenant))
        async with aclosing(blocks.read()) as updates:
            async for update in updates:
                for batch in stream.batches(update, await kv_events.parts_of(update), time.time()):
                    yield batch

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
