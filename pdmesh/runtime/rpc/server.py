"""The gRPC server of a service: exceptions to status, health, reflection, bounded messages, graceful drain.

    server = GrpcServer(config.host, config.port)
    server.register(decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer, "pdmesh.v1.DecodeService")
    port = await server.start()          # bound, but NOT_SERVING
    await server.set_serving(True)
    ...
    await server.drain(grace_s=10)       # NOT_SERVING, no new calls; waits for those that run, then cancels them

Interceptors of the caller run inside the one that maps errors, so that they see messages and exceptions as the handlers give
them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdmesh.runtime.addresses import bare_host, join_address
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import MeshError, NotFound, ResourceExhausted, Unavailable
from pdmesh.runtime.rpc.channel import MAX_MESSAGE_BYTES, message_size_options
from pdmesh.runtime.rpc.interceptor import Context, ErrorInterceptor, Handler, parts_of
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.proof import ProofInterceptor

# The standard gRPC health service, with watches that end when the server does.
#
# grpc_health's own servicer keeps a watch open until the end of a drain's grace period, and holds its lock while it writes, so
# that one client that does not read would block every change of state.


HEALTH_SERVICE = "grpc.health.v1.Health"
Response: TypeAlias = health_pb2.HealthCheckResponse


class HealthServicer:
    """Serve Check, List and Watch (grpc.health.v1.Health). On one event loop."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._closed = False
        self._changed = asyncio.Event()

    def set(self, service: str, serving: bool) -> None:
        """Set the state of a service; "" is the whole server. After `close`, nothing is serving any more."""
        self._serving[service] = serving and not self._closed
        self._announce()

    def close(self) -> None:
        """Set everything to NOT_SERVING for good; watches receive it and then end with UNAVAILABLE."""
        self._serving = dict.fromkeys(self._serving, False)
        self._closed = True
        self._announce()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: object) -> Response:
        """Return the current state; NOT_FOUND for an unknown service."""
        if request.service not in self._serving:
            raise NotFound(f"no service {request.service[:200]!r} here", field="service")
        return Response(status=self._status(request.service))

    async def List(self, request: health_pb2.HealthListRequest, context: object) -> health_pb2.HealthListResponse:
        """Return the current state of every service, and of the server under ""."""
        return health_pb2.HealthListResponse(statuses={name: Response(status=self._status(name)) for name in self._serving})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: object) -> AsyncIterator[Response]:
        """Yield the state now and after each change; of several quick changes the last."""
        told: int | None = None
        while True:
            changed, closed, status = self._changed, self._closed, self._status(request.service)
            if status != told:
                told = status
                yield Response(status=status)
            elif closed:
                raise Unavailable("the server stops")
            else:
                await changed.wait()

    def _status(self, service: str) -> int:
        serving = self._serving.get(service)
        if serving is None:
            return int(Response.SERVICE_UNKNOWN)
        return int(Response.SERVING if serving else Response.NOT_SERVING)

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


# A bound on the open calls of a server, over all connections.
#
# gRPC's own bound (`maximum_concurrent_rpcs`) would reject health checks too, so that a full server looks dead, and without
# RetryInfo, so that clients do not retry. Its bound on connections (`grpc.max_allowed_incoming_connections`) is not used either:
# in grpcio 1.85 some of the connections that it rejects keep a place for ever, and in the end no client gets in. The process's
# limit of open files bounds connections; at the limit open ones continue.


Req = TypeVar("Req")
Resp = TypeVar("Resp")
CHECK = "/grpc.health.v1.Health/Check"
NUM_CHECKS = 64
"""Places beyond the bound for health checks: a full server is not dead and must not be restarted."""
RETRY_DELAY_S = 1.0


class CallBound(grpc.aio.ServerInterceptor):
    """Reject excess calls with RESOURCE_EXHAUSTED and RetryInfo. Runs inside the interceptor that maps errors."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self.num_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Req, Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Req, Resp] | None:
        """Return the handler, or one that rejects. The call's place belongs to its task: it is free again when that has ended, in
        any way, and also if the client never sends its request."""
        most = self._max_calls + (NUM_CHECKS if handler_call_details.method == CHECK else 0)
        if self.num_calls >= most:
            return cast("grpc.RpcMethodHandler[Req, Resp]", grpc.stream_stream_rpc_method_handler(self._refuse))
        task = asyncio.current_task()
        assert task is not None
        self.num_calls += 1
        task.add_done_callback(self._ended)
        return await continuation(handler_call_details)

    def _ended(self, _: asyncio.Task[object]) -> None:
        self.num_calls -= 1

    async def _refuse(self, _requests: object, _context: object) -> NoReturn:
        """Reject, as if requests were streamed: for a unary request gRPC would wait for the message before it calls this."""
        message = f"streams: {self._max_calls} calls are open here, and more are not taken (max_streams)"
        raise ResourceExhausted(message, retry_delay_s=RETRY_DELAY_S, reason="streams")


# The interceptor that admits only members of the mesh, by the name in the caller's certificate.
#
# gRPC itself requires only a certificate of the CA; clients of the router may have one, too.


_SAN = "x509_subject_alternative_name"


class MemberInterceptor(grpc.aio.ServerInterceptor):
    """Reject calls whose certificate does not carry `name` with UNAUTHENTICATED. Runs inside the interceptor that maps errors."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Req, Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Req, Resp] | None:
        """Return the handler behind the check; None for an unknown method."""
        found = await continuation(handler_call_details)
        if found is None:
            return None
        handler = cast("Handler", found)
        behaviour, factory = parts_of(handler)

        def checked(request: object, context: Context) -> object:
            self._check(context)
            return behaviour(request, context)

        wrapped = factory(
            checked, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
        return cast("grpc.RpcMethodHandler[Req, Resp]", wrapped)

    def _check(self, context: Context) -> None:
        names = [name.decode("utf-8", "replace") for name in context.auth_context().get(_SAN, ())]
        if self._name not in names:
            shown = ", ".join(names) or "no name"
            problem = f"the caller's certificate carries {shown}; only those with {self._name!r} are of the mesh"
            raise MeshError(problem, code=grpc.StatusCode.UNAUTHENTICATED)


@dataclass(frozen=True)
class ConnectionLimits:
    """Bound connections and calls. `max_streams` of one connection: concurrent calls; more wait at the client. `max_age_s`: after
    that long it accepts no new calls, while running ones finish; 0: never. `max_idle_s`: it is closed after that long without a
    call; 0: never. `max_calls` over all connections: more are rejected; None: no bound."""

    max_streams: int = 4096
    max_age_s: float = 0.0
    max_idle_s: float = 0.0
    max_calls: int | None = None


DEFAULT_LIMITS = ConnectionLimits()

S = TypeVar("S")
Callers = Literal["members", "certified", "any"]
MIN_PING_INTERVAL_S = 0.2  # clients notice by their pings that a router stands still
KEEPALIVE_TIME_S = 30.0
KEEPALIVE_TIMEOUT_S = 10.0
MAX_PING_STRIKES = 2
MAX_METADATA_BYTES = 16 * 1024
STREAM_WINDOW_BYTES = 2 * 1024 * 1024

logger = logging.getLogger(__name__)


class ServerTls(Protocol):
    """What a server needs of TLS: the name that members' certificates carry, and its own credentials."""

    @property
    def name(self) -> str: ...
    def server_credentials(self, *, require_client: bool) -> grpc.ServerCredentials: ...


class GrpcServer:
    """Serve the services that are registered before `start` on one port. On one event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: ServerTls | None = None,
        callers: Callers = "members",
        secret: MeshSecret | None = None,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        share_port: bool = False,
    ) -> None:
        """Create the server on `port`; 0: any free one. A message larger than `max_message_bytes` is rejected with
        RESOURCE_EXHAUSTED.

        With `tls`, `callers` says which clients may call: those whose certificate carries the mesh's name, those with any
        certificate of the CA, or all. With `secret` every call but those of health and reflection must prove it. `share_port`:
        other processes of this user may listen there, too, and the kernel distributes the connections."""
        self.host = host
        self.port = port
        self._tls = tls
        self._callers = callers
        checks: list[grpc.aio.ServerInterceptor] = []
        if tls is not None and callers == "members":
            checks.append(MemberInterceptor(tls.name))
        if secret is not None:
            checks.append(ProofInterceptor(secret))
        self.bound = None if limits.max_calls is None else CallBound(limits.max_calls)
        bounds = () if self.bound is None else (self.bound,)
        chain = [ErrorInterceptor(), *bounds, *checks, *interceptors]
        self.server = grpc.aio.server(interceptors=chain, options=_options(max_message_bytes, limits, share_port=share_port))
        self._health = HealthServicer()
        self._service_names: list[str] = []
        self._drained: asyncio.Task[None] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    @property
    def address(self) -> str:
        """Return "host:port" as bound."""
        return join_address(self.host, self.port)

    def register(self, add: Callable[[S, grpc.aio.Server], object], servicer: S, full_service_name: str) -> None:
        """Add a service before `start`: the generated `add_XServicer_to_server`, its servicer, and "package.Service"."""
        add(servicer, self.server)
        self._service_names.append(full_service_name)

    async def start(self) -> int:
        """Bind and answer, with health NOT_SERVING; return the bound port. Raises ConfigError when the address cannot be
        bound."""
        reflection.enable_server_reflection((*self._service_names, HEALTH_SERVICE, reflection.SERVICE_NAME), self.server)
        await self.set_serving(False)
        try:
            self.port = self._add_port()
        except RuntimeError:
            raise _bind_error(self.host, self.port) from None
        await self.server.start()
        logger.info("listening on %s", self.address)
        return self.port

    def _add_port(self) -> int:
        if self._tls is None:
            return self.server.add_insecure_port(self.address)
        credentials = self._tls.server_credentials(require_client=self._callers != "any")
        return self.server.add_secure_port(self.address, credentials)

    async def set_serving(self, serving: bool, services: Iterable[str] | None = None) -> None:
        """Set the health of `services`; of all of them and of the whole server ("") if None."""
        for name in ("", *self._service_names) if services is None else services:
            self._health.set(name, serving)

    def set_health(self, serving: bool, services: Iterable[str]) -> None:
        """Set the health of these services; names that are no service of this server are allowed."""
        for name in services:
            self._health.set(name, serving)

    async def drain(self, grace_s: float) -> None:
        """Set health to NOT_SERVING and accept no new calls; wait up to `grace_s` seconds for running calls, then cancel them.

        Idempotent: a further call waits for the end of the first, whose grace period applies."""
        if self._drained is None:
            self._health.close()
            # gRPC crashes when two stops overlap, so there is only one, which no cancellation interrupts.
            self._drained = asyncio.create_task(self.server.stop(grace_s), name="drain")
        await asyncio.shield(self._drained)


def _options(max_message_bytes: int, limits: ConnectionLimits, *, share_port: bool) -> list[tuple[str, int]]:
    return [
        *_time_option("grpc.max_connection_age_ms", limits.max_age_s),
        *_time_option("grpc.max_connection_idle_ms", limits.max_idle_s),
        *message_size_options(max_message_bytes),
        # Without sharing, two processes on one port would split its calls at random: the second one must fail.
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.max_concurrent_streams", limits.max_streams),
        # Bound on the metadata of one call, all names and values together. Beyond it the call is rejected.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # A client that pings more often than the interval below, this often in a row, is disconnected.
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_TIME_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),  # what grpcio 1.85 goes by; a minute by default
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(MIN_PING_INTERVAL_S * 1000)),
        # What a client may send ahead of a handler that does not read. By default gRPC opens it to tens of megabytes.
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]


def _time_option(name: str, seconds: float) -> list[tuple[str, int]]:
    """Return the option in milliseconds; none for 0."""
    return [(name, round(seconds * 1000))] if seconds else []


def _bind_error(host: str, port: int) -> ConfigError:
    """Return the reason: gRPC says only that binding failed, so a bind of our own finds out why."""
    reason = "the address cannot be bound"
    try:
        family, kind, number, _, address = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
    return ConfigError(
        "--port", f"cannot listen on {join_address(host, port)}: {reason}", "choose another --port, or 0 for any free one"
    )
