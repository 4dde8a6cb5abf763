"""The Mesh service on the wire: thin handlers around jobs and requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING

from protos.v1 import mesh_pb2
from protos.v1.mesh_pb2_grpc import MeshServicer
from router import status
from router.core import Core
from router.job import Job
from router.jobs import Jobs
from router.objectives import ModelObjective
from router.request import Request
from router.timings import RequestTimings, now_ns
from runtime.errors import Unavailable

if TYPE_CHECKING:
    from protos.v1.mesh_pb2_grpc import _ServicerContext

LAST_WORDS_S = 2.0


class MeshService(MeshServicer):
    """Serves clients until it is drained."""

    def __init__(self, core: Core, objectives: tuple[ModelObjective, ...], registry_connected: Callable[[], bool]) -> None:
        self._core = core
        self._jobs = Jobs(core)
        self._objectives = objectives
        self._registry_connected = registry_connected
        self._requests: set[Request] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def Generate(
        self, request: mesh_pb2.GenerateRequest, context: _ServicerContext
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        return self._stream(self._jobs.from_generate(request, context.time_remaining()))

    def Chat(self, request: mesh_pb2.ChatRequest, context: _ServicerContext) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        return self._stream(self._jobs.from_chat(request, context.time_remaining()))

    async def Tokenize(self, request: mesh_pb2.TokenizeRequest, context: _ServicerContext) -> mesh_pb2.TokenizeResponse:
        return await self._jobs.tokenize(request)

    async def ListModels(self, request: mesh_pb2.ListModelsRequest, context: _ServicerContext) -> mesh_pb2.ListModelsResponse:
        return status.models(self._core)

    async def GetStatus(self, request: mesh_pb2.GetStatusRequest, context: _ServicerContext) -> mesh_pb2.GetStatusResponse:
        return status.status(self._core, self._objectives, registry_connected=self._registry_connected())

    async def drain(self, grace_s: float) -> None:
        """Admit nobody; let streams finish for `grace_s` seconds, then end them so that their clients resume elsewhere."""
        self._draining = True
        self._core.gate.close(Unavailable("this router is going; use another one"))
        for timeout_s in (grace_s, LAST_WORDS_S):
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
                return
            except TimeoutError:
                for request in self._requests:
                    request.fail(Unavailable("this router is going; resume on another one"))

    async def _stream(self, making: Coroutine[object, object, Job]) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        timings = RequestTimings(received_ns=now_ns())
        if self._draining:
            making.close()
            raise Unavailable("this router is going; use another one")
        job = await making
        timings.routed(timings.received_ns)
        request = Request(self._core, job, timings)
        self._requests.add(request)
        self._idle.clear()
        messages = request.messages()
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()
            self._requests.discard(request)
            if not self._requests:
                self._idle.set()
