"""The gRPC server of a service: exceptions to status, health, reflection, bounded messages, graceful drain.

    server = GrpcServer(config.host, config.port)
    server.register(decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer, "pdmesh.v1.DecodeService")
    port = await server.start()          # bound, but NOT_SERVING
    await server.set_serving(True)
    ...
    await server.drain(grace_s=10)       # NOT_SERVING, no new calls; waits for those that run, then cancels them

Interceptors given by the caller run inside the one that maps errors, so that they see messages and exceptions as the handlers
give them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.call_bound import CallBound
from pdmesh.runtime.rpc.channel import MAX_MESSAGE_BYTES, message_size_options
from pdmesh.runtime.rpc.health import HEALTH_SERVICE
from pdmesh.runtime.rpc.health import HealthServicer
from pdmesh.runtime.rpc.interceptor import ErrorInterceptor
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.runtime.rpc.tls_peer import MemberInterceptor


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection may do, and all together. `max_streams` of one: calls at the same time; more wait at the client.
    `max_age_s`: after so long it takes no new calls, while those that run go on to their end; 0: never. `max_idle_s`: it is
    closed after so long without a call; 0: never. `max_calls` of all connections: more are refused; None: no bound."""

    max_streams: int = 4096
    max_age_s: float = 0.0
    max_idle_s: float = 0.0
    max_calls: int | None = None


DEFAULT_LIMITS = ConnectionLimits()

S = TypeVar("S")
Callers = Literal["members", "certified", "any"]
MIN_PING_INTERVAL_S = 5.0
KEEPALIVE_TIME_S = 30.0
KEEPALIVE_TIMEOUT_S = 10.0
MAX_PING_STRIKES = 2
MAX_METADATA_BYTES = 16 * 1024
STREAM_WINDOW_BYTES = 2 * 1024 * 1024

logger = logging.getLogger(__name__)


class GrpcServer:
    """One listening port with the services that are registered before `start`. On one event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: Tls | None = None,
        callers: Callers = "members",
        limits: ConnectionLimits = DEFAULT_LIMITS,
        share_port: bool = False,
    ) -> None:
        """`port` 0: any free one. A message larger than `max_message_bytes` is refused with RESOURCE_EXHAUSTED.

        With `tls`, `callers` says who may call: whose certificate carries the mesh's name, who has any of the CA, or anybody.
        `share_port`: others of this user may listen there, too, and the kernel deals the connections out."""
        self.host = host
        self.port = port
        self._tls = tls
        self._callers = callers
        checks = [MemberInterceptor(tls.name)] if tls is not None and callers == "members" else []
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
        """ "host:port" as bound."""
        return _joined(self.host, self.port)

    def register(self, add: Callable[[S, grpc.aio.Server], object], servicer: S, full_service_name: str) -> None:
        """Adds a service before `start`: the generated `add_XServicer_to_server`, its servicer, and "package.Service"."""
        add(servicer, self.server)
        self._service_names.append(full_service_name)

    async def start(self) -> int:
        """Binds and answers, with health NOT_SERVING; returns the bound port. Raises ConfigError when the address cannot be
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
        """Sets the health of `services`; of all of them and of the whole server ("") if None."""
        for name in ("", *self._service_names) if services is None else services:
            self._health.set(name, serving)

    async def drain(self, grace_s: float) -> None:
        """Health NOT_SERVING, no new calls; waits up to `grace_s` seconds for the calls that run, then cancels them.

        Idempotent: a further call waits for the end of the first, whose grace stands."""
        if self._drained is None:
            self._health.close()
            # gRPC crashes when two stops overlap, so that there is one only, and nobody's cancellation interrupts it.
            self._drained = asyncio.create_task(self.server.stop(grace_s), name="drain")
        await asyncio.shield(self._drained)


def _options(max_message_bytes: int, limits: ConnectionLimits, *, share_port: bool) -> list[tuple[str, int]]:
    return [
        *_time_option("grpc.max_connection_age_ms", limits.max_age_s),
        *_time_option("grpc.max_connection_idle_ms", limits.max_idle_s),
        *message_size_options(max_message_bytes),
        # Unless they mean to, two processes on one port would share its calls at random: a second one has to fail.
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.max_concurrent_streams", limits.max_streams),
        # Of the metadata of one call, all names and values together. Beyond it the call is refused.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # Who pings more often than the interval below, so often in a row, is sent away.
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_TIME_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(MIN_PING_INTERVAL_S * 1000)),
        # What a client may send ahead of a handler that does not read. Left to itself gRPC opens it to tens of megabytes.
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]


def _time_option(name: str, seconds: float) -> list[tuple[str, int]]:
    """Nothing for 0."""
    return [(name, round(seconds * 1000))] if seconds else []


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _bind_error(host: str, port: int) -> ConfigError:
    """gRPC says only that it failed; an attempt of our own finds out why."""
    reason = "the address cannot be bound"
    try:
        family, kind, number, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
    return ConfigError(
        "--port", f"cannot listen on {_joined(host, port)}: {reason}", "choose another --port, or 0 for any free one"
    )
