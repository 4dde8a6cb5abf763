"""Receives OTLP over gRPC: traces are read, and everything is forwarded unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio

from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.config import Endpoint
from pdmesh.runtime.telemetry.otlp import headers, read_ca
from pdmesh.runtime.telemetry.received import Export, Unreadable, read_export

if TYPE_CHECKING:
    from collections.abc import Awaitable


TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
MAX_REQUEST_BYTES = 8 << 20
MAX_CALLS = 32
_EMPTY = b""  # the protobuf answer that accepts everything

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
OnExport = Callable[[Export], None]
OnBytes = Callable[[str, bytes], None]

logger = logging.getLogger(__name__)


class OtlpReceiver:
    """Serve one port, from `start` to `stop`. `on_export` receives spans, `on_bytes` the method and body of every call."""

    def __init__(self, host: str, port: int, on_export: OnExport, on_bytes: OnBytes, *, is_held: bool = False) -> None:
        """Create it. `is_held`: a launcher's socket that does not listen holds the port. Otherwise it is not shared: each process
        would get a part."""
        self._is_held = is_held
        self._host, self._port = host, port
        self._on_export, self._on_bytes = on_export, on_bytes
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Listen; return "host:port". Raises ConfigError if the port is taken."""
        options = (
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_concurrent_streams", MAX_CALLS),
            ("grpc.so_reuseport", int(self._is_held)),
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((_Methods({TRACES: self._traces, METRICS: self._other, LOGS: self._other}),))
        try:
            port = self._server.add_insecure_port(join_address(self._host, self._port))
        except RuntimeError as error:
            problem = f"cannot listen on {self._host} port {self._port}: {error}"
            raise ConfigError("--otlp-port", problem, "choose another --otlp-port, or 0 for any free one") from None
        await self._server.start()
        return join_address(self._host, port)

    async def stop(self) -> None:
        """Stop. Idempotent."""
        if self._server is not None:
            await self._server.stop(0.2)
            self._server = None

    async def _traces(self, method: str, body: bytes, context: Context) -> bytes:
        try:
            export = read_export(body)
        except Unreadable as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if export.num_refused:
            logger.warning("%d spans were refused, the first for: %s", export.num_refused, export.refusal)
        self._on_export(export)
        self._on_bytes(method, body)
        return export.answer()

    async def _other(self, method: str, body: bytes, context: Context) -> bytes:
        self._on_bytes(method, body)
        return _EMPTY


class _Methods(grpc.GenericRpcHandler):
    """Dispatch by path, on bytes: what is only forwarded is never parsed."""

    def __init__(self, methods: dict[str, Callable[[str, bytes, Context], Awaitable[bytes]]]) -> None:
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        handler = self._methods.get(method)
        if handler is None:
            return None

        async def call(body: bytes, context: Context) -> bytes:
            return await handler(method, body, context)

        return grpc.unary_unary_rpc_method_handler(call)


# Forwards to another collector without ever waiting for it: what does not fit is dropped and counted.


MAX_QUEUED_BYTES = 32 << 20
TIMEOUT_S = 5.0
PAUSE_S = 1.0
_MISSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Forwarder:
    """Queue and send calls in a task. A call without an answer is retried until newer ones need its place."""

    def __init__(self, endpoint: Endpoint, env: Mapping[str, str]) -> None:
        """Create it. `env` holds OpenTelemetry's variables for headers and CAs. Raises ConfigError."""
        self.num_sent = 0
        self.num_dropped = 0
        self._endpoint = endpoint
        self._headers = tuple(headers(env))
        self._ca = read_ca(env)
        self._queue: deque[tuple[str, bytes]] = deque()
        self._num_bytes = 0
        self._filled = asyncio.Event()
        self._is_reachable = True
        self._task: asyncio.Task[None] | None = None

    def put(self, method: str, body: bytes) -> None:
        """Queue a call; on the event loop."""
        self._queue.append((method, body))
        self._num_bytes += len(body)
        while self._num_bytes > MAX_QUEUED_BYTES:
            self._drop()
        self._filled.set()

    def start(self) -> None:
        """Start sending."""
        self._task = asyncio.create_task(self._run(), name="forward")

    async def stop(self) -> None:
        """Stop; the rest is dropped. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        async with self._open() as channel:
            while True:
                await self._filled.wait()
                if not self._queue:
                    self._filled.clear()
                elif not await self._send(channel, *self._take()):
                    await asyncio.sleep(PAUSE_S)

    def _open(self) -> grpc.aio.Channel:
        options = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 2000))
        if self._endpoint.encrypted:
            return grpc.aio.secure_channel(self._endpoint.target, grpc.ssl_channel_credentials(self._ca), options)
        return grpc.aio.insecure_channel(self._endpoint.target, options)

    def _take(self) -> tuple[str, bytes]:
        method, body = self._queue.popleft()
        self._num_bytes -= len(body)
        return method, body

    def _drop(self) -> None:
        self._take()
        self.num_dropped += 1

    async def _send(self, channel: grpc.aio.Channel, method: str, body: bytes) -> bool:
        """Send one call; False: no answer, send the same one again."""
        try:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            await call(body, timeout=TIMEOUT_S, metadata=self._headers)
        except grpc.aio.AioRpcError as error:
            self._note(reachable=False, words=f"{error.code().name}: {error.details()}")
            if error.code() not in _MISSING:
                self.num_dropped += 1
                return True
            self._queue.appendleft((method, body))
            self._num_bytes += len(body)
            return False
        self.num_sent += 1
        self._note(reachable=True)
        return True

    def _note(self, *, reachable: bool, words: str = "") -> None:
        """Log one line for each change."""
        if reachable != self._is_reachable:
            self._is_reachable = reachable
            if reachable:
                logger.info("%s takes traces again; %d calls were dropped so far", self._endpoint.target, self.num_dropped)
            else:
                logger.warning("%s does not take traces: %s", self._endpoint.target, words)
