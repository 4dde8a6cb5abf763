"""The identity of a caller: from the API key that a client presents to its tenant.

The caller of an RPC is in a context variable from the moment that its key is accepted. One function (`claim`) checks the tenant
of every request, for all protocols.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc
import grpc.aio

from pdmesh.runtime.errors import MeshError
from pdmesh.runtime.rpc.interceptor import Context, Handler, parts_of
from pdmesh.v1 import mesh_pb2
from router.auth.api_keys import KeyStore

Req = TypeVar("Req")
Resp = TypeVar("Resp")
MAX_SHOWN_CHARS = 512
OPEN_METHODS = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1alpha.ServerReflection/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/vllm.grpc.engine.VllmEngine/HealthCheck",
)
"""Methods of health probes, which need no key."""
ADMIN_METHODS = (
    "/pdmesh.v1.Mesh/GetStatus",
    "/pdmesh.v1.Mesh/Explain",
    "/pdmesh.v1.Mesh/SetTrafficSplit",
    "/pdmesh.v1.Mesh/SetServing",
    "/vllm.grpc.engine.VllmEngine/GetLoads",
    "/vllm.grpc.engine.VllmEngine/GetServerInfo",
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
)
"""Methods that show requests of all tenants, or direct them."""


NEEDS_ADMIN = "this is about requests of all tenants: it needs a key with admin"


@dataclass(frozen=True)
class Caller:
    """Identify the client of a call by the record of its key."""

    tenant: str
    admin: bool


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


class Unauthenticated(MeshError):
    """Report that a key is missing or not valid."""

    default_code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(MeshError):
    """Report that a valid key does not permit the call."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


def authenticate(store: KeyStore | None, authorization: str | None) -> None:
    """Set the caller of the current task from its `authorization` header; without a store no keys are required, and there is no
    caller. Raises Unauthenticated, Unavailable."""
    _caller.set(None if store is None else _checked(store, authorization or ""))


def authenticate_admin(store: KeyStore | None, authorization: str | None) -> None:
    """Do `authenticate` for what directs requests of all tenants. Raises PermissionDenied for a key without admin."""
    authenticate(store, authorization)
    caller = _caller.get()
    if caller is not None and not caller.admin:
        raise PermissionDenied(NEEDS_ADMIN)


def claim(options: mesh_pb2.RequestOptions) -> None:
    """Set the request's tenant to its caller's. Raises PermissionDenied when the request names another one."""
    options.tenant = claimed(options.tenant, "options.tenant")


def claimed(named: str, field: str) -> str:
    """Return the tenant of a call that names one in `field`, or none: its caller's, where keys are required. Raises
    PermissionDenied when it names another one."""
    caller = _caller.get()
    if caller is None:
        return named
    if named not in ("", caller.tenant):
        raise PermissionDenied(f"{field}: the API key belongs to another tenant; leave it out", field=field)
    return caller.tenant


def tenant() -> str | None:
    """Return the caller's tenant; None where no keys are required."""
    caller = _caller.get()
    return None if caller is None else caller.tenant


def _checked(store: KeyStore, authorization: str) -> Caller:
    scheme, _, shown = authorization.partition(" ")
    shown = shown.strip()
    if scheme.lower() != "bearer" or not shown:
        raise Unauthenticated("the API key is missing; send authorization: Bearer KEY", field="authorization")
    key = store.find(shown) if len(shown) <= MAX_SHOWN_CHARS else None
    if key is None:
        raise Unauthenticated("the API key is unknown, revoked or expired", field="authorization")
    return Caller(key.tenant, key.admin)


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Require a key for every call except those of probes. It runs inside the interceptor that maps errors."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Req, Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Req, Resp] | None:
        """Return the handler behind the check; None for an unknown method. A request without a valid key is not even parsed."""
        found = await continuation(handler_call_details)
        method = handler_call_details.method
        if found is None or method.startswith(OPEN_METHODS):
            return found
        handler = cast("Handler", found)
        try:
            caller = self._admitted(method, dict(handler_call_details.invocation_metadata or ()))
            wrapped = _called_by(handler, caller)
        except MeshError as error:
            wrapped = _refusing(handler, error)
        return cast("grpc.RpcMethodHandler[Req, Resp]", wrapped)

    def _admitted(self, method: str, metadata: Mapping[str, str | bytes]) -> Caller:
        shown = metadata.get("authorization")
        caller = _checked(self._store, shown if isinstance(shown, str) else "")
        if method in ADMIN_METHODS and not caller.admin:
            raise PermissionDenied(NEEDS_ADMIN)
        return caller


def _called_by(handler: Handler, caller: Caller) -> Handler:
    behaviour, factory = parts_of(handler)

    def call(request: object, context: Context) -> object:
        _caller.set(caller)
        return behaviour(request, context)

    return factory(call, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


def _refusing(handler: Handler, error: MeshError) -> Handler:
    _, factory = parts_of(handler)

    def call(request: object, context: Context) -> object:
        raise error

    return factory(call, request_deserializer=None, response_serializer=handler.response_serializer)
