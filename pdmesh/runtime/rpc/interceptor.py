"""Maps exceptions to gRPC status in a server interceptor, for all four kinds of call, also after the first streamed message.

Handlers are coroutines, or async generators where they stream. The wrapper of a streaming handler writes each message itself and
closes the generator in the call's own task, so that its `finally` has run when the call is over: also when the client cancels
between two messages. Requests that cannot be parsed (broken bytes, text that is not UTF-8) are INVALID_ARGUMENT instead of gRPC's
UNKNOWN.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import AsyncGeneratorType
from typing import NoReturn, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from pdmesh.runtime.errors import Cancelled, InvalidArgument, MeshError, status_of

Req = TypeVar("Req")
Resp = TypeVar("Resp")
# Quoted: only the type stubs of grpc are generic.
Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
Behaviour: TypeAlias = "Callable[[object, Context], Awaitable[object] | AsyncGenerator[object, None]]"


CANCEL_FOLLOWS_S = 1.0


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Map exceptions to status. It must be the outermost interceptor: exceptions of the others are mapped too."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Req, Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Req, Resp] | None:
        """Return the wrapped handler; None for an unknown method, which gRPC answers with UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return cast("grpc.RpcMethodHandler[Req, Resp]", _wrapped(cast("Handler", handler)))


@dataclass(frozen=True)
class _Unparsed:
    """Hold the error of a unary request that was not parsed until the wrapper, which can answer, sees it."""

    error: MeshError


def _wrapped(handler: Handler) -> Handler:
    behaviour, factory = parts_of(handler)
    call = _streaming(behaviour) if handler.response_streaming else _unary(behaviour)
    deserialize = handler.request_deserializer
    if deserialize is not None:
        deserialize = _checked(deserialize, raises=handler.request_streaming)
    return factory(call, request_deserializer=deserialize, response_serializer=handler.response_serializer)


def parts_of(handler: Handler) -> tuple[Behaviour, Callable[..., Handler]]:
    """Return the handler's function, and gRPC's factory for its kind of call."""
    kinds = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, factory = kinds[handler.request_streaming, handler.response_streaming]
    return cast("Behaviour", behaviour), cast("Callable[..., Handler]", factory)


def _unary(behaviour: Behaviour) -> Callable[[object, Context], Awaitable[object]]:
    async def call(request: object, context: Context) -> object:
        try:
            _check_parsed(request)
            return await cast("Awaitable[object]", behaviour(request, context))
        except BaseException as error:  # noqa: BLE001 - the boundary
            await _end(error, context)

    return call


def _streaming(behaviour: Behaviour) -> Callable[[object, Context], Awaitable[None]]:
    async def call(request: object, context: Context) -> None:
        try:
            _check_parsed(request)
            result = behaviour(request, context)
            if not isinstance(result, AsyncGeneratorType):  # writes to the context itself, as the health service does
                await cast("Awaitable[object]", result)
                return
            async with aclosing(result) as responses:
                async for response in responses:
                    try:  # inlined: this is the per-token path
                        await context.write(response)
                    except Exception:
                        # A call that was just cancelled may refuse a message before its task is cancelled. The cancellation must
                        # come before the generator is closed: in the middle of its `finally` it would cut the clean-up short.
                        await asyncio.sleep(CANCEL_FOLLOWS_S)
                        raise
        except BaseException as error:  # noqa: BLE001 - the boundary
            await _end(error, context)

    return call


def _check_parsed(request: object) -> None:
    if isinstance(request, _Unparsed):
        raise request.error


def _checked(deserialize: Callable[[bytes], object], *, raises: bool) -> Callable[[bytes], object]:
    """Return a deserializer whose errors the wrapper sees. A streamed request is parsed while the handler reads it, within the
    wrapper's `try`; a unary one before the handler is called."""

    def parse(data: bytes) -> object:
        try:
            return deserialize(data)
        except MeshError as error:  # of an interceptor that looks at the bytes
            if raises:
                raise
            return _Unparsed(error)
        except Exception as error:
            problem = f"the message cannot be parsed ({error}); check the client's protos and that text is UTF-8"
            invalid = InvalidArgument("request", problem)
            if raises:
                raise invalid from error
            return _Unparsed(invalid)

    return parse


async def _end(error: BaseException, context: Context) -> NoReturn:
    """End the call with the error's status, or re-raise what gRPC must see itself."""
    if isinstance(error, grpc.aio.AbortError) or not isinstance(error, (Exception, asyncio.CancelledError)):
        raise error
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the client left or the server stops
            raise error
        # Something that the handler waited for was cancelled, not the call: without a status the client would wait for ever.
        error = Cancelled("the work was cancelled inside the server")
    status = status_of(error)
    await context.abort(status.code, status.message, (*context.trailing_metadata(), *status.trailing_metadata))
