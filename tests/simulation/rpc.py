"""gRPC over the simulated network: `grpc.aio.server` and `grpc.aio.insecure_channel`, with what the product relies on.

    client: Call ── open, message, half-close, cancel ──► ServerCall (a task of the server's process)
                 ◄── message, status, credit ──

Messages travel as bytes, made and parsed by the generated stubs. A stream has a window: a writer waits until its reader has read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tests.simulation.network import Connection, Network
from tests.simulation.world import MILLISECOND, current_process

WINDOW_BYTES = 64 * 1024
BACKOFF_NS = 200 * MILLISECOND
CONNECT_TIMEOUT_NS = 1000 * MILLISECOND
OPEN, MESSAGE, END, CANCEL, STATUS, CREDIT = range(6)
READY, IDLE, FAILING = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
)
_call_ids = itertools.count(1)


class Mailbox:
    """Messages of one direction of a call, at their reader: bytes, then the end."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.is_ended = False
        self._waiters: list[asyncio.Future[None]] = []

    def put(self, message: bytes) -> None:
        self.messages.append(message)
        self.wake()

    def end(self) -> None:
        self.is_ended = True
        self.wake()

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self) -> None:
        """Wait for the next message, or the end."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class Window:
    """What a writer may still send."""

    def __init__(self) -> None:
        self.bytes_left = WINDOW_BYTES
        self.is_over = False
        self._changed: list[asyncio.Future[None]] = []

    def add(self, size: int) -> None:
        self.bytes_left += size
        self._wake()

    def close(self) -> None:
        self.is_over = True
        self._wake()

    async def take(self, size: int) -> None:
        while self.bytes_left <= 0 and not self.is_over:
            waiter = asyncio.get_running_loop().create_future()
            self._changed.append(waiter)
            await waiter
        self.bytes_left -= size

    def _wake(self) -> None:
        waiters, self._changed = self._changed, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


# The client's end


class Channel:
    """A channel to one address: it connects at the first call, and again after a failure, with a pause."""

    def __init__(self, network: Network, address: str) -> None:
        process = current_process()
        assert process is not None
        self.network, self.address, self.process = network, address, process
        self._connection: Connection | None = None
        self._dialling = 0
        self._not_before_ns = 0
        self._problem = ""
        self._state = IDLE
        self._is_closed = False
        self.calls: dict[int, Call] = {}
        self._watchers: list[asyncio.Future[None]] = []

    def unary_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any) -> Any:
        return self._method(UnaryCall, path, request_serializer, response_deserializer, streams=False)

    def unary_stream(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any) -> Any:
        return self._method(StreamCall, path, request_serializer, response_deserializer, streams=False)

    def stream_stream(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any) -> Any:
        return self._method(StreamCall, path, request_serializer, response_deserializer, streams=True)

    def _method(self, kind: type[Call], path: str, serialize: Any, parse: Any, *, streams: bool) -> Callable[..., Call]:
        def begin(request: Any = None, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            call = kind(self, path, serialize, parse, timeout, metadata, streams=streams)
            if not streams:
                call.send_request(request)
            elif request is not None:
                call.feed(request)
            return call

        return begin

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if self._is_closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        if try_to_connect and self._state is not READY:
            self._dial()
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self.get_state() is last:
            waiter = asyncio.get_running_loop().create_future()
            self._watchers.append(waiter)
            await waiter

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not READY:
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for call in list(self.calls.values()):
            call.cancel()
        if self._connection is not None:
            self._connection.close(0, "the client closed the channel")
        self._set(grpc.ChannelConnectivity.SHUTDOWN)

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def open(self, call: Call) -> None:
        """Send a call on its way, now or when there is a connection."""
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        self.calls[call.call_id] = call
        if self._connection is not None:
            call.connected(self._connection)
        elif self.network.world.now_ns < self._not_before_ns:
            self.process.later(0, call.failed, self._problem)
        else:
            self._dial()

    def _dial(self) -> None:
        now = self.network.world.now_ns
        if self._dialling or now < self._not_before_ns or self._is_closed:
            return
        self._dialling = number = next(_call_ids)
        self._set(grpc.ChannelConnectivity.CONNECTING)
        self.network.dial(self.process, self.address, lambda connection, reason: self._dialled(number, connection, reason))
        self.process.later(CONNECT_TIMEOUT_NS, self._dialled, number, None, f"connect timed out to {self.address}")

    def _dialled(self, number: int, connection: Connection | None, reason: str) -> None:
        if number != self._dialling or self._is_closed:
            if connection is not None:
                connection.close(0, "nobody wants it any more")
            return
        self._dialling = 0
        if connection is None:
            self._down(reason)
            return
        self._connection = connection
        connection.ends[0].received = self._received
        connection.ends[0].broken = self._broken
        self._set(READY)
        for call in list(self.calls.values()):
            call.connected(connection)

    def _broken(self, reason: str) -> None:
        self._connection = None
        self._down(reason)

    def _down(self, reason: str) -> None:
        self._problem = f"failed to connect to all addresses; last error: {reason}"
        self._not_before_ns = self.network.world.now_ns + BACKOFF_NS
        self._set(FAILING)
        for call in list(self.calls.values()):
            call.failed(reason)
        self.process.later(BACKOFF_NS, self._rest)

    def _rest(self) -> None:
        if self._state is FAILING:
            self._set(IDLE)

    def _set(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _received(self, kind: int, call_id: int, *content: Any) -> None:
        call = self.calls.get(call_id)
        if call is not None:
            call.received(kind, *content)


class Call:
    """A call at its client."""

    def __init__(
        self, channel: Channel, path: str, serialize: Any, parse: Any, timeout: float | None, metadata: Any, *, streams: bool
    ) -> None:
        self.call_id = next(_call_ids)
        self._channel, self._path = channel, path
        self._serialize, self._parse = serialize or bytes, parse or bytes
        self._streams = streams
        self._inbox, self._window = Mailbox(), Window()
        self._waiting: list[tuple[int, tuple[Any, ...]]] = []
        self._connection: Connection | None = None
        self._status: tuple[grpc.StatusCode, str, tuple[Any, ...]] | None = None
        self._is_cancelled = False
        self._half_closed = False
        self._callbacks: list[Callable[[Any], object]] = []
        self._feeding: asyncio.Task[None] | None = None
        self._deadline = asyncio.get_running_loop().call_later(timeout, self._expired) if timeout is not None else None
        self._send(256, OPEN, path, tuple(tuple(pair) for pair in metadata or ()), timeout)
        if timeout is not None and timeout <= 0:
            channel.process.later(0, self._expired)
        channel.open(self)

    def send_request(self, request: Any) -> None:
        data = self._serialize(request)
        self._send(len(data), MESSAGE, data)
        self._send(8, END)

    def feed(self, requests: Any) -> None:
        async def run() -> None:
            async for request in requests:
                await self.write(request)
            await self.done_writing()

        self._feeding = asyncio.ensure_future(run())

    async def write(self, request: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        data = self._serialize(request)
        await self._cancelling(self._window.take(len(data)))
        self._raise_for_status()
        self._send(len(data), MESSAGE, data)

    async def done_writing(self) -> None:
        if not self._half_closed:
            self._half_closed = True
            self._send(8, END)

    async def read(self) -> Any:
        while not self._inbox.messages:
            if self._status is not None:
                self._raise_for_status()
                return grpc.aio.EOF
            await self._cancelling(self._inbox.change())
        data = self._inbox.messages.popleft()
        self._send(8, CREDIT, len(data))
        return self._parse(data)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def wait_for_connection(self) -> None:
        while self._connection is None and self._status is None:
            await self._cancelling(self._inbox.change())
        self._raise_for_status()

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._send(8, CANCEL)
        self._finish(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def cancelled(self) -> bool:
        return self._is_cancelled or (self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED)

    def done(self) -> bool:
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        await self._until_done()
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        await self._until_done()
        assert self._status is not None
        return self._status[1]

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await self._until_done()
        assert self._status is not None
        return grpc.aio.Metadata(*self._status[2])

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline.when() - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._status is None:
            self._callbacks.append(callback)
        else:
            callback(self)

    # What the channel calls.

    def connected(self, connection: Connection) -> None:
        self._connection = connection
        waiting, self._waiting = self._waiting, []
        for size, message in waiting:
            connection.send(0, size, message[0], self.call_id, *message[1:])
        self._inbox.wake()

    def failed(self, reason: str) -> None:
        self._finish(grpc.StatusCode.UNAVAILABLE, reason)

    def received(self, kind: int, *content: Any) -> None:
        if self._status is not None:
            return
        if kind == MESSAGE:
            self._inbox.put(content[0])
        elif kind == CREDIT:
            self._window.add(content[0])
        elif kind == STATUS:
            self._finish(*content)

    def _expired(self) -> None:
        if self._status is None:
            self._send(8, CANCEL)
            self._finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _send(self, size: int, *message: Any) -> None:
        if self._connection is not None:
            self._connection.send(0, size, message[0], self.call_id, *message[1:])
        elif self._status is None:
            self._waiting.append((size, message))

    def _finish(self, code: grpc.StatusCode, details: str, trailing: Sequence[Any] = ()) -> None:
        if self._status is not None:
            return
        self._status = (code, details, tuple(trailing))
        self._channel.calls.pop(self.call_id, None)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._feeding is not None:
            self._feeding.cancel()
        self._window.close()
        self._inbox.end()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback, self)

    def _raise_for_status(self) -> None:
        if self._status is None:
            return
        code, details, trailing = self._status
        if self._is_cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details, details)

    async def _cancelling(self, waiting: Any) -> None:
        """Wait; a cancelled wait cancels the call, as in gRPC."""
        try:
            await waiting
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _until_done(self) -> None:
        while self._status is None:
            await self._inbox.change()


class StreamCall(Call):
    """A call whose responses are streamed."""


class UnaryCall(Call):
    """A call with one response, which `await` returns."""

    def __await__(self) -> Any:
        return self._response().__await__()

    async def _response(self) -> Any:
        response = await self.read()
        if response is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "no response came with OK", ""
            )
        while self._status is None:
            await self._cancelling(self._inbox.change())
        self._raise_for_status()
        return response


# The server's end


class Server:
    """A gRPC server of a process."""

    def __init__(self, network: Network, interceptors: Sequence[Any]) -> None:
        process = current_process()
        assert process is not None
        self.network, self.process = network, process
        self._interceptors = tuple(interceptors)
        self._generic: list[Any] = []
        self._handlers: dict[str, Any] = {}
        self._connections: dict[Connection, dict[int, ServerCall]] = {}
        self.address = ""
        self._is_stopping = False
        self._idle = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        self._handlers.update({f"/{service_name}/{method}": handler for method, handler in method_handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or self.network.new_port()
        self.address = f"{host}:{number}"
        if self.address in self.network.listeners:
            raise RuntimeError(f"Failed to bind to address {address}")
        return number

    async def start(self) -> None:
        self.network.listeners[self.address] = self

    async def stop(self, grace: float | None) -> None:
        self._is_stopping = True
        self.network.listeners.pop(self.address, None)
        with_calls = asyncio.get_running_loop().time() + (grace or 0.0)
        while self._num_calls() and (left := with_calls - asyncio.get_running_loop().time()) > 0:
            self._idle.clear()
            try:
                async with asyncio.timeout(left):
                    await self._idle.wait()
            except TimeoutError:
                break
        for calls in list(self._connections.values()):
            for call in list(calls.values()):
                call.abandon(grpc.StatusCode.CANCELLED, "CANCELLED", tell=True)
        for connection in list(self._connections):
            connection.close(1, "the server stopped")
        self._connections.clear()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        await asyncio.get_running_loop().create_future()
        return True

    def accept(self, connection: Connection) -> None:
        calls: dict[int, ServerCall] = {}
        if self._is_stopping:
            connection.close(1, "the server stops")
            return
        self._connections[connection] = calls
        connection.ends[1].received = lambda kind, call_id, *content: self._received(connection, calls, kind, call_id, *content)
        connection.ends[1].broken = lambda reason: self._broken(connection, calls)

    def ended(self, calls: dict[int, ServerCall], call_id: int) -> None:
        calls.pop(call_id, None)
        if not self._num_calls():
            self._idle.set()

    async def handler(self, path: str, metadata: tuple[Any, ...]) -> Any:
        """Return the handler behind all interceptors; None: there is no such method."""
        details = _Details(path, metadata)

        async def last(details: Any) -> Any:
            found = self._handlers.get(path)
            for generic in self._generic:
                found = found or generic.service(details)
            return found

        return await _chained(self._interceptors, last)(details)

    def _num_calls(self) -> int:
        return sum(map(len, self._connections.values()))

    def _received(self, connection: Connection, calls: dict[int, ServerCall], kind: int, call_id: int, *content: Any) -> None:
        call = calls.get(call_id)
        if kind == OPEN:
            if self._is_stopping:
                connection.send(1, 8, STATUS, call_id, grpc.StatusCode.UNAVAILABLE, "the server stops", ())
                return
            calls[call_id] = ServerCall(self, connection, calls, call_id, *content)
        elif call is not None:
            call.received(kind, *content)

    def _broken(self, connection: Connection, calls: dict[int, ServerCall]) -> None:
        self._connections.pop(connection, None)
        for call in list(calls.values()):
            call.abandon(grpc.StatusCode.CANCELLED, "the connection broke")


class _Details:
    """gRPC's HandlerCallDetails."""

    def __init__(self, method: str, metadata: tuple[Any, ...]) -> None:
        self.method = method
        self.invocation_metadata = metadata


def _chained(interceptors: tuple[Any, ...], last: Any) -> Any:
    if not interceptors:
        return last
    first, rest = interceptors[0], _chained(interceptors[1:], last)

    async def run(details: Any) -> Any:
        return await first.intercept_service(rest, details)

    return run


class ServerCall:
    """A call at its server, which is gRPC's ServicerContext too."""

    def __init__(
        self,
        server: Server,
        connection: Connection,
        calls: dict[int, ServerCall],
        call_id: int,
        path: str,
        metadata: tuple[Any, ...],
        timeout: float | None,
    ) -> None:
        self._server, self._connection, self._calls, self._id = server, connection, calls, call_id
        self._path, self._metadata = path, metadata
        loop = asyncio.get_running_loop()
        self._ends_at = None if timeout is None else loop.time() + timeout
        self._inbox, self._window = Mailbox(), Window()
        self._parse: Callable[[bytes], Any] = bytes
        self._serialize: Callable[[Any], bytes] = bytes
        self._trailing: tuple[Any, ...] = ()
        self._is_over = False
        self._is_cancelled = False
        self._callbacks: list[Callable[[Any], object]] = []
        self._task = loop.create_task(self._run())
        self._timer = None if timeout is None else loop.call_later(max(0.0, timeout), self._expired)

    # gRPC's context

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - asyncio.get_running_loop().time())

    def trailing_metadata(self) -> tuple[Any, ...]:
        return self._trailing

    def set_trailing_metadata(self, trailing: Sequence[Any]) -> None:
        self._trailing = tuple(trailing)

    def peer(self) -> str:
        return f"ipv4:10.0.0.{self._connection.ends[0].process.name}"

    def auth_context(self) -> dict[str, Any]:
        return {}

    def cancelled(self) -> bool:
        return self._is_cancelled

    def done(self) -> bool:
        return self._is_over

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Sequence[Any] = ()) -> None:
        if not self._is_over:
            self._end(code, details, tuple(trailing) or self._trailing)
        raise grpc.aio.AbortError("Locally aborted.")

    async def read(self) -> Any:
        while not self._inbox.messages:
            if self._inbox.is_ended or self._is_over:
                return grpc.aio.EOF
            await self._inbox.change()
        data = self._inbox.messages.popleft()
        self._send(8, CREDIT, len(data))
        return self._parse(data)

    async def write(self, response: Any) -> None:
        data = self._serialize(response)
        if self._is_over:
            raise grpc.aio.UsageError("RPC already finished.")
        await self._window.take(len(data))
        if self._is_over:
            raise grpc.aio.UsageError("RPC already finished.")
        self._send(len(data), MESSAGE, data)

    # The network

    def received(self, kind: int, *content: Any) -> None:
        if kind == MESSAGE:
            self._inbox.put(content[0])
        elif kind == END:
            self._inbox.end()
        elif kind == CREDIT:
            self._window.add(content[0])
        elif kind == CANCEL:
            self.abandon(grpc.StatusCode.CANCELLED, "the client cancelled")

    def abandon(self, code: grpc.StatusCode, details: str, *, tell: bool = False) -> None:
        """Cancel the handler: nobody waits for it."""
        if self._is_over:
            return
        self._is_cancelled = True
        if tell:
            self._send(8, STATUS, code, details, self._trailing)
        self._over()
        self._task.cancel()

    def _expired(self) -> None:
        self.abandon(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", tell=True)

    async def _run(self) -> None:
        try:
            handler = await self._server.handler(self._path, self._metadata)
            if handler is None:
                self._end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ())
                return
            self._parse = handler.request_deserializer or bytes
            self._serialize = handler.response_serializer or bytes
            await self._handle(handler)
            self._end(grpc.StatusCode.OK, "", self._trailing)
        except grpc.aio.AbortError:
            self._end(grpc.StatusCode.INTERNAL, "aborted without a status", ())
        except asyncio.CancelledError:
            self._end(grpc.StatusCode.CANCELLED, "the handler was cancelled", ())
            raise
        except Exception as error:  # noqa: BLE001  as gRPC does
            self._server.network.world.note("unexpected", self._path, type(error).__name__, error)
            self._end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}", ())

    async def _handle(self, handler: Any) -> None:
        request = self._requests() if handler.request_streaming else await self.read()
        if request is grpc.aio.EOF:
            return
        behaviour = (
            (handler.unary_unary, handler.unary_stream),
            (handler.stream_unary, handler.stream_stream),
        )[handler.request_streaming][handler.response_streaming]
        result = behaviour(request, self)
        if handler.response_streaming and hasattr(result, "__aiter__"):
            async for response in result:
                await self.write(response)
            return
        response = await result
        if not handler.response_streaming:
            await self.write(response)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def _end(self, code: grpc.StatusCode, details: str, trailing: tuple[Any, ...]) -> None:
        if not self._is_over:
            self._send(64, STATUS, code, details, trailing)
            self._over()

    def _over(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._window.close()
        self._inbox.end()
        self._server.ended(self._calls, self._id)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback, self)

    def _send(self, size: int, kind: int, *content: Any) -> None:
        self._connection.send(1, size, kind, self._id, *content)


def install(network: Callable[[], Network]) -> None:
    """Have grpc.aio make simulated channels and servers."""
    grpc.aio.insecure_channel = lambda target, options=None, **_: Channel(network(), target)  # type: ignore[assignment]
    grpc.aio.server = lambda *, interceptors=(), **_: Server(network(), interceptors or ())  # type: ignore[assignment]
