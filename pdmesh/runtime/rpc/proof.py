"""Proofs of the mesh secret on calls: a channel that adds them, and a server interceptor that demands them.

The channel is a wrapper rather than a gRPC interceptor: one of grpc.aio's would put a task between every stream and its reader,
and could not see the bytes of the request, which the proof covers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn, TypeVar, cast

import grpc
import grpc.aio

from pdmesh.runtime.errors import MeshError
from pdmesh.runtime.rpc.interceptor import Handler, parts_of
from pdmesh.runtime.rpc.mesh_secret import NO_BODY, MeshSecret, digest_of, refused

PROOF_KEY = "pdmesh-proof-bin"
OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
"""Served without a proof: Kubernetes' probes send no metadata, and the schema is public."""

Req = TypeVar("Req")
Resp = TypeVar("Resp")
C = TypeVar("C")


class ProofInterceptor(grpc.aio.ServerInterceptor):
    """Reject calls without a proof of the mesh secret with UNAUTHENTICATED, before their request is read. Runs inside the
    interceptor that maps errors."""

    def __init__(self, secret: MeshSecret) -> None:
        self._secret = secret

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Req, Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Req, Resp] | None:
        """Return the handler, which checks that a request of one message is the one of the proof; or one that rejects."""
        method = str(handler_call_details.method)
        if method.startswith(OPEN_SERVICES):
            return await continuation(handler_call_details)
        try:
            digest = self._secret.check(method, _proof_in(handler_call_details.invocation_metadata))
        except MeshError as error:
            return cast("grpc.RpcMethodHandler[Req, Resp]", _rejecting(error))
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        return cast("grpc.RpcMethodHandler[Req, Resp]", _bound(cast("Handler", handler), digest))


def _proof_in(metadata: object) -> bytes | None:
    pairs = cast("tuple[tuple[str, str | bytes], ...]", metadata or ())
    found = [value for key, value in pairs if key == PROOF_KEY]
    return found[0] if len(found) == 1 and isinstance(found[0], bytes) else None


def _rejecting(error: MeshError) -> Handler:
    """Return a handler that raises, as if requests were streamed: for a unary one gRPC would wait for the message first."""

    async def reject(_requests: object, _context: object) -> NoReturn:
        raise error

    return grpc.stream_stream_rpc_method_handler(reject)


def _bound(handler: Handler, digest: bytes) -> Handler:
    behaviour, factory = parts_of(handler)
    parse = handler.request_deserializer

    def checked(data: bytes) -> object:
        if digest_of(data) != digest:
            raise refused("the request is not the one that the call's proof of the mesh secret was made for")
        return data if parse is None else parse(data)

    return factory(behaviour, request_deserializer=checked, response_serializer=handler.response_serializer)


class _Method:
    """Make the calls of one method, each with a proof."""

    def __init__(self, inner: Callable[..., object], method: str, secret: MeshSecret) -> None:
        self._inner, self._method, self._secret = inner, method, secret

    def _proven(self, metadata: object, digest: bytes) -> tuple[tuple[str, str | bytes], ...]:
        given = cast("tuple[tuple[str, str | bytes], ...]", tuple(cast("tuple[object, ...]", metadata or ())))
        return (*given, (PROOF_KEY, self._secret.prove(self._method, digest)))


class _UnaryMethod(_Method):
    def __init__(
        self, inner: Callable[..., object], method: str, secret: MeshSecret, serialize: Callable[[object], bytes] | None
    ) -> None:
        super().__init__(inner, method, secret)
        self._serialize = serialize

    def __call__(self, request: object, *, metadata: object = None, **options: object) -> object:
        body = cast("bytes", request) if self._serialize is None else self._serialize(request)
        return self._inner(body, metadata=self._proven(metadata, digest_of(body)), **options)


class _StreamMethod(_Method):
    def __call__(self, requests: object = None, *, metadata: object = None, **options: object) -> object:
        given = () if requests is None else (requests,)
        return self._inner(*given, metadata=self._proven(metadata, NO_BODY), **options)


class _ProvingChannel:
    """Pass everything on to a channel of gRPC's, for asyncio or not, and add a proof to each call."""

    def __init__(self, channel: object, secret: MeshSecret) -> None:
        self._channel, self._secret = channel, secret

    def unary_unary(self, method: str, request_serializer: object = None, *rest: object, **options: object) -> _UnaryMethod:
        return self._unary("unary_unary", method, request_serializer, rest, options)

    def unary_stream(self, method: str, request_serializer: object = None, *rest: object, **options: object) -> _UnaryMethod:
        return self._unary("unary_stream", method, request_serializer, rest, options)

    def stream_unary(self, method: str, *rest: object, **options: object) -> _StreamMethod:
        return self._stream("stream_unary", method, rest, options)

    def stream_stream(self, method: str, *rest: object, **options: object) -> _StreamMethod:
        return self._stream("stream_stream", method, rest, options)

    def _stream(self, kind: str, method: str, rest: tuple[object, ...], options: Mapping[str, object]) -> _StreamMethod:
        return _StreamMethod(getattr(self._channel, kind)(method, *rest, **options), method, self._secret)

    def _unary(
        self, kind: str, method: str, serialize: object, rest: tuple[object, ...], options: Mapping[str, object]
    ) -> _UnaryMethod:
        inner = getattr(self._channel, kind)(method, None, *rest, **options)  # the bytes are made before the call, to sign them
        return _UnaryMethod(inner, method, self._secret, cast("Callable[[object], bytes] | None", serialize))

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)

    async def __aenter__(self) -> _ProvingChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cast("grpc.aio.Channel", self._channel).close()

    def __enter__(self) -> _ProvingChannel:
        return self

    def __exit__(self, *_: object) -> None:
        cast("grpc.Channel", self._channel).close()


def proving(channel: C, secret: MeshSecret | None) -> C:
    """Return `channel` (of grpc or grpc.aio) with a proof on every call; the channel itself without a secret."""
    return channel if secret is None else cast("C", _ProvingChannel(channel, secret))
