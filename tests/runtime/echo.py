"""A gRPC service with one method of each kind, whose behaviours a test plugs in; messages are StringValue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import StringValue

from pdmesh.runtime.rpc.channel import MAX_MESSAGE_BYTES, connect
from pdmesh.runtime.rpc.server import DEFAULT_LIMITS, ConnectionLimits, GrpcServer

SERVICE = "pdmesh.test.Echo"
KINDS = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")
FACTORIES = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler,
    "UnaryStream": grpc.unary_stream_rpc_method_handler,
    "StreamUnary": grpc.stream_unary_rpc_method_handler,
    "StreamStream": grpc.stream_stream_rpc_method_handler,
}
Behaviours = dict[str, Callable[..., object]]


def add_to_server(behaviours: Behaviours, server: grpc.aio.Server) -> None:
    handlers = {
        kind: FACTORIES[kind](
            behaviour, request_deserializer=StringValue.FromString, response_serializer=StringValue.SerializeToString
        )
        for kind, behaviour in behaviours.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@asynccontextmanager
async def serving(
    behaviours: Behaviours, max_message_bytes: int = MAX_MESSAGE_BYTES, limits: ConnectionLimits = DEFAULT_LIMITS
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer("127.0.0.1", 0, max_message_bytes=max_message_bytes, limits=limits)
    server.register(add_to_server, behaviours, SERVICE)
    await server.start()
    await server.set_serving(True)
    async with connect(server.address) as channel:
        yield server, channel
    await server.drain(0)


async def call(channel: grpc.aio.Channel, kind: str, *requests: StringValue | bytes, is_silent: bool = False) -> list[str]:
    """All responses; a request given as bytes goes out as it is. A caller that is silent sends nothing on a stream: where a call
    is refused while a message is being sent, gRPC may say INTERNAL in the refusal's place."""
    path = f"/{SERVICE}/{kind}"

    def serialize(request: StringValue | bytes) -> bytes:
        return request if isinstance(request, bytes) else request.SerializeToString()

    sent = requests or (StringValue(value="x"),)
    stream = _silence() if is_silent else iter(sent)
    if kind == "UnaryUnary":
        return [(await channel.unary_unary(path, serialize, StringValue.FromString)(sent[0])).value]
    if kind == "UnaryStream":
        return [message.value async for message in channel.unary_stream(path, serialize, StringValue.FromString)(sent[0])]
    if kind == "StreamUnary":
        return [(await channel.stream_unary(path, serialize, StringValue.FromString)(stream)).value]
    return [message.value async for message in channel.stream_stream(path, serialize, StringValue.FromString)(stream)]


async def _silence() -> AsyncIterator[StringValue]:
    await asyncio.Event().wait()
    yield StringValue()
