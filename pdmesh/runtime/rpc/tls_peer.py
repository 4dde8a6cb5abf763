"""Only members of the mesh may call: the interceptor that looks at the name in the caller's certificate.

gRPC itself asks no more of a caller than a certificate of the CA; clients of the router may have one, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc
import grpc.aio

from pdmesh.runtime.errors import MeshError
from pdmesh.runtime.rpc.interceptor import Context, Handler, parts_of

Req = TypeVar("Req")
Resp = TypeVar("Resp")
_SAN = "x509_subject_alternative_name"


class MemberInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls whose certificate does not carry `name` with UNAUTHENTICATED. Inside the one that maps errors."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Req, Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Req, Resp] | None:
        """The handler behind the check; None for an unknown method."""
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
