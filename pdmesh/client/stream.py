"""Streams of a request's events, sync and async. They differ in how they wait only: what to accept is client_session's,
when to try again client_retry's business."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from pdmesh.client.channel import Preference
from pdmesh.client.client_retry import Retrier, unasked
from pdmesh.client.client_session import StreamSession
from pdmesh.client.types import Completed, Event
from pdmesh.errors import Cancelled, MeshError, Unavailable, error_from_rpc
from pdmesh.runtime.telemetry.caller import begin_request
from pdmesh.runtime.telemetry.propagation import Metadata
from pdmesh.v1 import mesh_pb2

Request = mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest


class SyncCall(Protocol):
    """A running server-streaming call of a sync channel."""

    def __next__(self) -> mesh_pb2.GenerateResponse: ...

    def cancel(self) -> object: ...


class AsyncCall(Protocol):
    """A running server-streaming call of an async channel."""

    async def read(self) -> object: ...

    def cancel(self) -> object: ...


class _Attempts:
    """What both streams share: the session, its attempts and the router that proved itself."""

    def __init__(self, request: Request, retrier: Retrier, preference: Preference) -> None:
        self.session = StreamSession(request)
        self._retrier = retrier
        self._preference = preference
        self._num_calls = 0
        self._span = begin_request("chat" if isinstance(request, mesh_pb2.ChatRequest) else "text_completion", request.model)

    def next_call(self) -> tuple[int, Request, float | None, Metadata]:
        """Index of the router to ask, what to ask, the seconds that it has, and the caller's trace."""
        request = self.session.request(self._num_calls)
        self._num_calls += 1
        return self._retrier.address, request, self._retrier.time_left(time.monotonic()), self._span.metadata

    def accept(self, response: mesh_pb2.GenerateResponse) -> Event | None:
        self._retrier.progressed(time.monotonic())
        self._preference.address = self._retrier.address
        event = self.session.accept(response)
        if isinstance(event, Completed):
            self._complete(event)
        return event

    def _complete(self, event: Completed) -> None:
        usage = event.usage
        self._span.set({"gen_ai.usage.input_tokens": usage.prompt_tokens, "gen_ai.usage.output_tokens": usage.completion_tokens})
        self._span.end()

    def left(self) -> None:
        """Nobody reads on: of a stream that is not complete, its caller has left."""
        self._span.end("" if self.session.completed else "CANCELLED")

    def failed(self, error: MeshError) -> float:
        """Seconds until the next attempt; raises when there is none. The caller has not cancelled the stream."""
        error = unasked(error)
        try:
            delay = self._retrier.failed(error, time.monotonic(), resuming=self.session.resuming)
        except MeshError as final:
            self._span.end(final.code.name, final.message)
            raise
        if isinstance(error, Unavailable):
            self.session.lost()
        return delay


def _ended_early() -> MeshError:
    return Unavailable("the router ended the stream before it was complete")


class Stream:
    """Iterator over the events of one request. Leaving it early (`close`, `with`, garbage) cancels the request.

    Raises MeshError where the stream fails for good. Belongs to one thread, but for `cancel`.
    """

    def __init__(
        self,
        open_call: Callable[[int, Request, float | None, Metadata], SyncCall],
        request: Request,
        retrier: Retrier,
        preference: Preference,
    ) -> None:
        self._open_call = open_call
        self._attempts = _Attempts(request, retrier, preference)
        self._stopped = threading.Event()
        self._closed = False
        self._call = open_call(*self._attempts.next_call())

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._closed:
            event = self._step()
            if event is not None:
                return event
        raise StopIteration

    def _step(self) -> Event | None:
        """One event, or None after something that is none of the caller's business."""
        try:
            return self._attempts.accept(next(self._call))
        except StopIteration:
            error = _ended_early()
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
        except BaseException:
            self.close()
            raise
        self._go_on_after(error)
        return None

    def _go_on_after(self, error: MeshError) -> None:
        if self._attempts.session.completed:
            self.close()
            return
        if self._stopped.is_set():
            raise Cancelled("the stream was cancelled")
        if self._stopped.wait(self._attempts.failed(error)):
            raise Cancelled("the stream was cancelled")
        self._call = self._open_call(*self._attempts.next_call())

    def cancel(self) -> None:
        """Ends the request. A thread that waits for the next event gets Cancelled. May be called from any thread, repeatedly."""
        self._stopped.set()
        self._call.cancel()

    def close(self) -> None:
        """Ends the request, if it has not ended; the iterator is exhausted then."""
        self._closed = True
        self._attempts.left()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class AsyncStream:
    """Async iterator over the events of one request. Leaving it early (`aclose`, `async with`, a cancelled task) cancels the
    request. Raises MeshError where the stream fails for good."""

    def __init__(
        self,
        open_call: Callable[[int, Request, float | None, Metadata], AsyncCall],
        request: Request,
        retrier: Retrier,
        preference: Preference,
    ) -> None:
        self._open_call = open_call
        self._attempts = _Attempts(request, retrier, preference)
        self._stopped = asyncio.Event()
        self._closed = False
        self._call = open_call(*self._attempts.next_call())

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._closed:
            event = await self._step()
            if event is not None:
                return event
        raise StopAsyncIteration

    async def _step(self) -> Event | None:
        """One event, or None after something that is none of the caller's business."""
        try:
            response = await self._call.read()
            if isinstance(response, mesh_pb2.GenerateResponse):
                return self._attempts.accept(response)
            error = _ended_early()
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
        except asyncio.CancelledError:
            # Either this task is cancelled, or `cancel` ended the call under it.
            if not self._stopped.is_set():
                await self.aclose()
                raise
            error = Cancelled("the stream was cancelled")
        except MeshError:
            await self.aclose()
            raise
        await self._go_on_after(error)
        return None

    async def _go_on_after(self, error: MeshError) -> None:
        if self._attempts.session.completed:
            await self.aclose()
            return
        if await self._stopped_within(0.0 if self._stopped.is_set() else self._attempts.failed(error)):
            raise Cancelled("the stream was cancelled")
        self._call = self._open_call(*self._attempts.next_call())

    async def _stopped_within(self, delay_s: float) -> bool:
        if delay_s > 0:
            try:
                await asyncio.wait_for(self._stopped.wait(), delay_s)
            except TimeoutError:
                return False
        return self._stopped.is_set()

    def cancel(self) -> None:
        """Ends the request. A task that waits for the next event gets Cancelled. May be called repeatedly, on the event loop."""
        self._stopped.set()
        self._call.cancel()

    async def aclose(self) -> None:
        """Ends the request, if it has not ended; the iterator is exhausted then."""
        self._closed = True
        self._attempts.left()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
