"""Several requests at once on one stream: their responses as they come, in each request's order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from pdmesh.runtime.errors import as_mesh_error, status_of
from pdmesh.third_party.kserve import grpc_service_pb2 as pb
from router.api.kserve.responses import failed

# What one stream holds for a client that reads slowly; beyond it, its requests' own bounds hold (max_buffered_tokens).
MAX_READY_RESPONSES = 64
MAX_REQUESTS = 1024
"""On one stream at a time; further ones are read when there is room."""

Answering = Callable[[pb.ModelInferRequest], AsyncGenerator[pb.ModelInferResponse, None]]


class Many:
    """One stream. `answer` makes the responses of a request, or raises MeshError at once or later."""

    def __init__(self, answer: Answering, *, wants_status: bool) -> None:
        """`wants_status`: the first error ends the stream, as its status; else it is the response of its request alone."""
        self._answer = answer
        self._wants_status = wants_status
        self._ready: asyncio.Queue[pb.ModelStreamInferResponse | BaseException | None] = asyncio.Queue(MAX_READY_RESPONSES)
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._running: set[asyncio.Task[None]] = set()

    async def responses(self, requests: AsyncIterator[pb.ModelInferRequest]) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Until the client has sent its last request and every one is answered. Left early, all of them are cancelled."""
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
