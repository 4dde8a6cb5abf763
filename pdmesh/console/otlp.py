"""Takes OTLP over gRPC: traces are read, all that comes is handed on as it came."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.received import Export, Unreadable, read_export

if TYPE_CHECKING:
    from collections.abc import Awaitable

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
MAX_REQUEST_BYTES = 8 << 20
MAX_CALLS = 32
_EMPTY = b""  # the answer to what is taken whole, in protobuf

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
OnExport = Callable[[Export], None]
OnBytes = Callable[[str, bytes], None]

logger = logging.getLogger(__name__)


class OtlpReceiver:
    """One listening port, from `start` to `stop`. `on_export` gets spans, `on_bytes` the method and body of every call."""

    def __init__(self, host: str, port: int, on_export: OnExport, on_bytes: OnBytes, *, is_held: bool = False) -> None:
        """`is_held`: by a launcher's socket that does not listen. Else nobody may share the port: each would get a part."""
        self._is_held = is_held
        self._host, self._port = host, port
        self._on_export, self._on_bytes = on_export, on_bytes
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Listens; returns "host:port". Raises ConfigError where the port is taken."""
        options = (
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_concurrent_streams", MAX_CALLS),
            ("grpc.so_reuseport", int(self._is_held)),
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((_Methods({TRACES: self._traces, METRICS: self._other, LOGS: self._other}),))
        try:
            port = self._server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            problem = f"cannot listen on {self._host} port {self._port}: {error}"
            raise ConfigError("--otlp-port", problem, "choose another --otlp-port, or 0 for any free one") from None
        await self._server.start()
        return f"{self._host}:{port}"

    async def stop(self) -> None:
        """Idempotent."""
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
    """By path, on bytes: what is only handed on is never parsed."""

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
