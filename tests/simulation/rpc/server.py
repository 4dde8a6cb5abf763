"""gRPC's server over the simulated network: what `grpc.aio.server` returns, with what the product relies on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tests.simulation.environment.network import Connection, Network
from tests.simulation.rpc.calls import CANCEL, CREDIT, END, MESSAGE, OPEN, STATUS, Mailbox, Window, patience_ns
from tests.simulation.rpc.client import Channel
from tests.simulation.world import current_process

LATE_CALL_S = 0.005
"""How much later than calls behind it one may begin."""


class Server:
    """A gRPC server of a process."""

    def __init__(self, network: Network, interceptors: Sequence[Any], patience_ns: int) -> None:
        process = current_process()
        assert process is not None
        self.network, self.process = network, process
        self._interceptors = tuple(interceptors)
        self._patience_ns = patience_ns
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
        connection.patience_ns[1] = self._patience_ns
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
        """Cancel the handler: its call is over."""
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
        rng = self._server.network.world.rng
        try:
            if not rng.getrandbits(4):  # calls of one connection begin in any order
                await asyncio.sleep(rng.random() * LATE_CALL_S)
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
    grpc.aio.insecure_channel = lambda target, options=None, **_: Channel(network(), target, options or ())  # type: ignore[assignment]
    grpc.aio.server = lambda *, interceptors=(), options=None, **_: Server(  # type: ignore[assignment]
        network(), interceptors or (), patience_ns(options or ())
    )
