"""A gRPC channel to servicers of this process: stubs call them without a socket, and messages are not copied.

Statuses, deadlines and cancellation are as over a connection. It has the kinds of calls and the methods that this router uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Self

import grpc
import grpc.aio

from pdmesh.runtime.errors import Unimplemented, status_of


class LocalChannel:
    """Hold servicers, which the generated `add_…_to_server` functions register here, and call them as a channel does."""

    def __init__(self, name: str) -> None:
        """Create it. `name`: what the servicers stand for."""
        self._name = name
        self._handlers: dict[str, Any] = {}
        self._calls: set[LocalCall] = set()

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        """Take the methods of a servicer, as a server does."""
        self._handlers.update({f"/{service}/{method}": handler for method, handler in handlers.items()})

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignore them: they are the registered methods again."""

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the function that calls the method."""
        return partial(self._unary, path, "unary_unary")

    def stream_unary(self, path: str, *_: object, **__: object) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the function that calls the method with an iterator of requests."""
        return partial(self._unary, path, "stream_unary")

    def unary_stream(self, path: str, *_: object, **__: object) -> Callable[..., LocalCall]:
        """Return the function that opens the method's stream for a request."""
        return partial(self._stream, path)

    def stream_stream(self, path: str, *_: object, **__: object) -> Callable[..., LocalCall]:
        """Return the function that opens the method's stream; requests are written to it."""
        return partial(self._duplex, path)

    async def close(self, grace: float | None = None) -> None:
        """Cancel all streams."""
        for call in tuple(self._calls):
            call.cancel()

    async def _unary(
        self, path: str, kind: str, request: object, *, timeout: float | None = None, metadata: object = None
    ) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await getattr(self._handler(path), kind)(request, None)
        except Exception as error:
            raise _rpc_error(error) from error

    def _stream(self, path: str, request: object, *, timeout: float | None = None, metadata: object = None) -> LocalCall:
        return self._open(lambda: self._handler(path).unary_stream(request, None))

    def _duplex(self, path: str) -> LocalCall:
        requests: asyncio.Queue[object] = asyncio.Queue()
        return self._open(lambda: self._handler(path).stream_stream(_read(requests), None), requests)

    def _open(self, begin: Callable[[], AsyncGenerator[Any, None]], requests: asyncio.Queue[object] | None = None) -> LocalCall:
        call = LocalCall(_responses(begin), requests, self._calls.discard)
        self._calls.add(call)
        return call

    def _handler(self, path: str) -> Any:
        if path not in self._handlers:
            raise Unimplemented(f"{path} does not exist for {self._name}")
        return self._handlers[path]


class LocalCall:
    """Hold one open stream. One task reads it."""

    def __init__(
        self,
        responses: AsyncGenerator[Any, None],
        requests: asyncio.Queue[object] | None,
        on_end: Callable[[LocalCall], None],
    ) -> None:
        self._responses = responses
        self._requests = requests
        self._on_end = on_end
        self._reading: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_cancelled = False

    def cancelled(self) -> bool:
        """Return whether `cancel` was called before the end."""
        return self._is_cancelled

    def cancel(self) -> bool:
        """End the stream: its reader gets CancelledError. Return whether it was open."""
        if self._is_cancelled:
            return False
        self._is_cancelled = True
        self._on_end(self)
        if self._reading is not None:
            self._reading.cancel()
        else:
            self._closing = asyncio.get_running_loop().create_task(self._responses.aclose())
        return True

    async def write(self, request: object) -> None:
        """Send a request. Raises InvalidStateError after `cancel`."""
        if self._is_cancelled or self._requests is None:
            raise asyncio.InvalidStateError("the stream has ended")
        self._requests.put_nowait(request)

    async def read(self) -> Any:
        """Return the next response, `grpc.aio.EOF` after the last. Raises AioRpcError, or CancelledError after `cancel`."""
        if self._is_cancelled:
            raise asyncio.CancelledError
        self._reading = asyncio.create_task(self._next())
        try:
            return await self._reading
        except Exception as error:
            self._on_end(self)
            raise _rpc_error(error) from error
        finally:
            self._reading = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        response = await self.read()
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return response

    async def _next(self) -> Any:
        return await anext(self._responses, grpc.aio.EOF)


async def _responses(begin: Callable[[], AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """Yield the method's responses; a method that is not there is an error of the first read, as over a connection."""
    responses = begin()
    try:
        async for response in responses:
            yield response
    finally:
        await responses.aclose()


async def _read(requests: asyncio.Queue[object]) -> AsyncIterator[object]:
    while True:
        yield await requests.get()


def _rpc_error(error: BaseException) -> grpc.aio.AioRpcError:
    status = status_of(error)
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.message)
