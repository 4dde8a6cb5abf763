"""gRPC's client over the simulated network: what `grpc.aio.insecure_channel` returns, with what the product relies on.

    Call ── open, message, half-close, cancel ──► ServerCall
         ◄── message, status, credit ──

Messages travel as bytes, made and parsed by the generated stubs. A stream has a window: a writer waits until its reader has read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tests.simulation.environment.network import Connection, Network
from tests.simulation.rpc.calls import (
    BACKOFF_NS,
    CANCEL,
    CONNECT_TIMEOUT_NS,
    CREDIT,
    END,
    FAILING,
    IDLE,
    MESSAGE,
    OPEN,
    READY,
    STATUS,
    Mailbox,
    Window,
    new_call_id,
    patience_ns,
)
from tests.simulation.world import current_process


class Channel:
    """A channel to one address: it connects at the first call, and again after a failure, with a pause."""

    def __init__(self, network: Network, address: str, options: Sequence[tuple[str, Any]] = ()) -> None:
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
        self._patience_ns = patience_ns(options)

    def unary_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any) -> Any:
        return self._method(UnaryCall, path, request_serializer, response_deserializer, streams=False)

    def stream_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any) -> Any:
        return self._method(UnaryCall, path, request_serializer, response_deserializer, streams=True)

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
        self._dialling = number = new_call_id()
        self._set(grpc.ChannelConnectivity.CONNECTING)

        def dialled(connection: Connection | None, reason: str) -> None:
            self._dialled(number, connection, reason)

        self.network.dial(self.process, self.address, dialled, is_grpc=True)
        self.process.later(CONNECT_TIMEOUT_NS, self._dialled, number, None, f"connect timed out to {self.address}")

    def _dialled(self, number: int, connection: Connection | None, reason: str) -> None:
        if number != self._dialling or self._is_closed:
            if connection is not None:
                connection.close(0, "the channel has another connection, or is closed")
            return
        self._dialling = 0
        if connection is None:
            self._down(reason)
            return
        self._connection = connection
        connection.patience_ns[0] = self._patience_ns
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
        self.call_id = new_call_id()
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
            try:
                if hasattr(requests, "__aiter__"):
                    async for request in requests:
                        await self.write(request)
                else:
                    for request in requests:
                        await self.write(request)
                await self.done_writing()
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                return  # the call is over: its reader gets the status
            except Exception:  # noqa: BLE001  as gRPC does
                self.cancel()

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
